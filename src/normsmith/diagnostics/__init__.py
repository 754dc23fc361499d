"""What happens inside a model."""

from normsmith.diagnostics.anchoring import Anchoring, anchoring
from normsmith.diagnostics.blocks import Blocks, find_blocks
from normsmith.diagnostics.depth import depth_contribution
from normsmith.diagnostics.divergence import diverged_at
from normsmith.diagnostics.gates import GateReport, gate_report
from normsmith.diagnostics.jacobian import Extremes, block_jacobians, extreme_singular_values
from normsmith.diagnostics.removability import Removability, audit_removal
from normsmith.diagnostics.sinks import attention_sinks
from normsmith.diagnostics.stream import StreamLayer, StreamProfile, profile_stream, stream_layers, stream_scale

__all__ = [
    "Anchoring",
    "Blocks",
    "Extremes",
    "GateReport",
    "Removability",
    "StreamLayer",
    "StreamProfile",
    "anchoring",
    "attention_sinks",
    "audit_removal",
    "block_jacobians",
    "depth_contribution",
    "diverged_at",
    "extreme_singular_values",
    "find_blocks",
    "gate_report",
    "profile_stream",
    "stream_layers",
    "stream_scale",
]
