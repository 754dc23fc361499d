"""What happens inside a model."""

from normsmith.diagnostics.removability import Removability, audit_removal
from normsmith.diagnostics.stream import stream_scale

__all__ = ["Removability", "audit_removal", "stream_scale"]
