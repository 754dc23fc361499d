"""What `import normsmith` costs beside `import torch`, each in fresh processes."""

from __future__ import annotations

import subprocess
import sys
import time

from normsmith.bench.timing import Timing, interleave


def bench_import(rounds: int = 5) -> dict[str, Timing]:
    """Seconds of a fresh interpreter that imports torch alone, and torch with normsmith."""

    def case(statement: str) -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        return time.perf_counter() - started

    statements = {"import torch": "import torch", "import torch, normsmith": "import torch, normsmith"}
    return interleave({name: lambda s=s: case(s) for name, s in statements.items()}, rounds, warmup=1)
