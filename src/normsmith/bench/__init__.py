"""Benchmarks: a correctness gate first, then ratios within one run."""

from normsmith.bench.collapse import bench_collapse
from normsmith.bench.decode import Decoder, DecodeSpeed, bench_decode, check_agreement, greedy_decode
from normsmith.bench.depth import DepthCost, bench_depth
from normsmith.bench.family import LABELS, decode_family, with_fused_norms
from normsmith.bench.imports import bench_import
from normsmith.bench.ops import bench_sphere_update
from normsmith.bench.removal import bench_removal
from normsmith.bench.step import bench_training_step
from normsmith.bench.timing import Timing, interleave, seconds_of

__all__ = [
    "LABELS",
    "DecodeSpeed",
    "Decoder",
    "DepthCost",
    "Timing",
    "bench_collapse",
    "bench_decode",
    "bench_depth",
    "bench_import",
    "bench_removal",
    "bench_sphere_update",
    "bench_training_step",
    "check_agreement",
    "decode_family",
    "greedy_decode",
    "interleave",
    "seconds_of",
    "with_fused_norms",
]
