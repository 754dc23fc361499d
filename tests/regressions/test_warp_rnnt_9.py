"""warp-rnnt 9, mlx-benchmark PR 21, vLLM PR 36899, quack 77: speed-ups that reversed once they were measured properly.

Kind of fault: the method of timing. Known delays are reported as they are, an asynchronous device is waited for, cases
that differ in their results are not timed, and the compiled baseline is always there.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from normsmith.bench import bench_decode, bench_sphere_update, interleave, ops, seconds_of
from normsmith.bench import decode as decode_module
from normsmith.errors import VerificationError
from normsmith.models import NormsmithForCausalLM, preset_config


class Device:
    """Returns at once and works on until it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.busy_until = 0.0
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "synchronize", self.wait)

    def wait(self) -> None:
        time.sleep(max(0.0, self.busy_until - time.perf_counter()))

    def start(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, time.perf_counter()) + seconds


def test_work_of_an_asynchronous_device_is_measured_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    cases = {
        "short": lambda: seconds_of(lambda: device.start(0.02)),
        "long": lambda: seconds_of(lambda: device.start(0.05)),
    }
    measured = interleave(cases, rounds=5, warmup=1)
    assert measured["short"].median == pytest.approx(0.02, rel=0.05)
    assert measured["long"].median == pytest.approx(0.05, rel=0.05)
    assert measured["long"].relative_to(measured["short"]) == pytest.approx(2.5, rel=0.05)


def test_a_slow_first_call_does_not_count() -> None:
    calls: list[int] = []

    def case() -> float:
        calls.append(1)
        return 9.0 if len(calls) == 1 else 1.0

    assert interleave({"compiles first": case}, rounds=3, warmup=1)["compiles first"].seconds == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("damage", [1.5, float("nan")])
def test_models_that_disagree_get_no_speed(damage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
    models = {name: NormsmithForCausalLM(preset_config("llama", **sizes)).eval() for name in ("tapered", "folded")}
    models["folded"].load_state_dict(models["tapered"].state_dict())
    with torch.no_grad():
        models["folded"].model.layers[1].mlp.down_proj.weight.mul_(damage)
    measured: list[Any] = []
    monkeypatch.setattr(decode_module, "interleave", lambda *args, **kwargs: measured.append(args))
    prompt = torch.randint(90, (2, 7))
    with pytest.raises(VerificationError, match="no speed is reported"):
        bench_decode(models, prompt, new_tokens=24, rounds=1)
    assert measured == []


def test_the_baseline_is_measured_eager_and_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    names = list(bench_sphere_update(tokens=16, width=12, rounds=1))
    for what in ("add + layer_norm", "sphere update, fused"):
        assert {f"{what}, eager", f"{what}, compiled"} <= set(names)
    assert len(compiled) == 2


def test_a_kernel_with_another_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    update = ops.sphere_update
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(ops, "sphere_update", lambda *args: update(*args) * 1.001)
    with pytest.raises(VerificationError, match="nothing is timed"):
        bench_sphere_update(tokens=16, width=12, rounds=1)
