"""Where a run happened: versions, machine and threads, so that it can be repeated or doubted."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

import normsmith


def environment() -> dict[str, str]:
    """Versions and hardware as text."""
    facts = {
        "normsmith": normsmith.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "torch threads": str(torch.get_num_threads()),
    }
    for package in ("torch", "transformers", "accelerate", "tokenizers", "datasets", "numpy"):
        facts[package] = metadata.version(package)
    if torch.accelerator.is_available():
        facts["accelerator"] = str(torch.accelerator.current_accelerator())
    return facts


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123 (a device of the kernel, not a file of ours)
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
