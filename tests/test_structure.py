"""The order of imports, what `import normsmith` costs, and the size of files."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import normsmith

SOURCE = Path(normsmith.__file__).parent
LAYERS = [
    {"errors", "config", "registry", "ops", "folders", "ranks", "traits"},
    {"norms"},
    {"connections"},
    {"schedules", "surgery"},
    {"models"},
    {"data", "training", "evaluation", "diagnostics"},
    {"studies", "report", "bench"},
    {"cli", "__main__"},
]


def layer(package: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if package in names)


def imports(path: Path) -> set[str]:
    """Packages of normsmith that a file imports, at any depth of nesting."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("normsmith."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("normsmith.")}
    return found


def test_imports_go_one_way() -> None:
    wrong: list[str] = []
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).with_suffix("").parts[0]
        if package == "__init__":
            continue
        wrong += [f"{path.relative_to(SOURCE)} imports {p}" for p in imports(path) if layer(p) > layer(package)]
    assert wrong == []


def test_importing_normsmith_loads_nothing_heavy() -> None:
    code = (
        "import sys, normsmith; print(*(m for m in ('torch', 'transformers', 'pydantic', 'rich') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


def test_every_public_name_loads() -> None:
    assert {getattr(normsmith, name).__name__ for name in normsmith.__all__ if name[0].isupper()}
    assert set(normsmith.__all__) <= set(dir(normsmith))


def test_files_stay_readable() -> None:
    long = {str(p.relative_to(SOURCE)): n for p in SOURCE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert long == {}
