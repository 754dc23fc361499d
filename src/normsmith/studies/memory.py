"""How much memory a run took at its peak."""

from __future__ import annotations

import sys

import torch


class PeakMemory:
    """Make it before the run begins; afterwards `read()` gives the peak in bytes, or None where it is not the run's.

    On a CUDA device it is what torch's allocator gave out, reset here. Without one it is the resident memory of the
    process, libraries included, whose peak cannot be set back: it is the run's only where the process does nothing
    else (`alone`) and has done no other run.
    """

    _runs = 0

    def __init__(self, alone: bool) -> None:
        PeakMemory._runs += 1
        self.counts = alone and PeakMemory._runs == 1
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> int | None:
        """Bytes at the peak so far."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        if not self.counts or sys.platform == "win32":
            return None
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
