"""What the regressions share; models this small are faster on one thread."""

from __future__ import annotations

from tests.tiny import one_thread, wide_statistics

__all__ = ["one_thread", "wide_statistics"]
