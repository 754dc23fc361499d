"""The README, the contributor's guide and the architecture page are run, not believed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normsmith.norms import create_norm, norms

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = [line.strip() for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize(
    ("document", "number"),
    [(document.name, i) for document in DOCUMENTS for i in range(len(blocks(document, "python")))],
)
def test_python_blocks_run(
    document: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = next(d for d in DOCUMENTS if d.name == document)
    exec(compile(blocks(path, "python")[number], f"{document} block {number}", "exec"), {"__name__": "block"})
    if document == "README.md":
        assert "folded" in capsys.readouterr().out or list(tmp_path.glob("runs/*"))


def test_the_first_example_is_at_most_ten_lines_of_statements() -> None:
    lines = [line for line in blocks(ROOT / "README.md", "python")[0].splitlines() if line and "import" not in line]
    assert len(lines) <= 10


def test_shell_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`normsmith …` lines run here, in order; make targets must exist; anything else must be a known pip line."""
    from normsmith.cli import app
    from normsmith.cli.common import run

    monkeypatch.chdir(tmp_path)
    ran = 0
    for line in commands():
        words = shlex.split(line)
        if words[0] == "make":
            subprocess.run(["make", "-n", "-C", str(ROOT), *words[1:]], check=True, capture_output=True)
        elif words[0] == "normsmith":
            monkeypatch.setattr(sys, "argv", words)
            code = run(app)
            assert code == 0, f"{line}: {capsys.readouterr().err}"
            ran += 1
        else:
            assert words[:2] == ["pip", "install"], f"the README has a command that no test covers: {line}"
    assert ran >= 5
    assert (tmp_path / "runs/taper-folded/model.safetensors").exists()


def test_every_link_and_picture_in_the_repository_exists() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_norm_in_three_lines_is_a_norm() -> None:
    source = blocks(ROOT / "CONTRIBUTING.md", "python")[0]
    assert len([line for line in source.splitlines() if line.startswith("        return") or "def " in line]) <= 4
    try:
        exec(compile(source, "CONTRIBUTING.md", "exec"), {"__name__": "block"})
        norm, x = create_norm("mynorm", 8), torch.randn(3, 8)
        torch.testing.assert_close(norm(x).double(), norm.reference(x), rtol=1e-6, atol=1e-6)
        assert torch.equal(type(norm).from_site(norm, 8)(x), norm(x))
    finally:
        norms._classes.pop("mynorm", None)  # pyright: ignore[reportPrivateUsage]
