"""What happens inside a model."""

from normsmith.diagnostics.stream import stream_scale

__all__ = ["stream_scale"]
