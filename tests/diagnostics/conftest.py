"""Models this small are faster on one thread."""

from tests.tiny import one_thread

__all__ = ["one_thread"]
