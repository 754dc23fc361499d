"""What the taper can do beyond the paper's schedule: steps, one-shot calibration, chosen sites, one after another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from normsmith.errors import ConfigError, InputError
from normsmith.schedules import TaperConfig
from normsmith.surgery import find_norms, taper_
from tests.conftest import scramble
from tests.schedules.test_schedule_taper import small, tapered, train


def test_start_and_end_can_be_given_in_steps() -> None:
    config = TaperConfig(start_step=25, end_step=100)
    assert config.span(300) == (25, 100)
    assert [config.gate(k, 300) for k in (25, 100, 299)] == [1, 0, 0]
    assert TaperConfig(start_step=10).span(100) == (10, 100)
    assert TaperConfig(end_step=50).span(100) == (5, 50)
    with pytest.raises(InputError, match="ends at step 100, after the run of 90 steps"):
        config.span(90)
    with pytest.raises(ConfigError, match="end_step=5 must lie after start_step=9"):
        TaperConfig(start_step=9, end_step=5)


def test_one_shot_calibration_is_the_plain_mean_over_the_last_steps() -> None:
    model = small()
    controller = taper_(model, TaperConfig(warmup=0.4, calibration="batch", calibration_steps=3), steps=20)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in controller.sites}
    scales: list[float] = []

    def watch(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            x = args[0].detach().double()
            power = (x * module.gamma.detach().double()).square().sum(-1)
            s = torch.sqrt(x.square().mean(-1) + module.config.eps)
            seen[name].append((float((power / s).mean()), float(power.mean())))

        return hook

    handles = [norm.register_forward_hook(watch(name)) for name, norm in controller.sites.items()]
    anchor = model.model.norm
    handles.append(
        anchor.register_forward_pre_hook(
            lambda m, a: scales.append(a[0].detach().square().mean(-1).sqrt().mean().item())
        )
    )
    train(model, controller, 8, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for handle in handles:
        handle.remove()
    for name, norm in controller.sites.items():
        last = seen[name][-6:]  # three steps of two micro-batches
        assert float(norm.scale) == pytest.approx(sum(a for a, _ in last) / sum(b for _, b in last), rel=1e-5)
    assert float(controller.target) == pytest.approx(sum(scales[-6:]) / 6, rel=1e-5)


def test_a_part_of_the_placement_can_be_chosen() -> None:
    model = small()
    controller = taper_(model, TaperConfig(where="*.0.*"), steps=20)
    assert len(controller.sites) == 2
    assert all(".0." in name for name in controller.sites)
    with pytest.raises(InputError, match="no site matches where='\\*.7.\\*'"):
        taper_(small(), TaperConfig(where="*.7.*"), steps=20)


def test_sites_go_one_after_another_in_the_given_order() -> None:
    model = small()
    names = [site.name for site in find_norms(model) if site.role == "pre"]
    order = tuple(reversed(names))
    config = TaperConfig(warmup=0.2, order=order)
    controller = taper_(model, config, steps=50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    for step in range(1, 51):
        before = {name: float(norm.scale) for name, norm in controller.sites.items()}
        train(model, controller, 1, optimizer)
        for name, norm in controller.sites.items():
            if float(norm.scale) != before[name]:
                starts[name] = step
                assert float(norm.gate) == 1
            if float(norm.gate) == 0:
                ends.setdefault(name, step)
            assert float(norm.gate_eval) in (0, 1)
    assert starts == dict(zip(order, (10, 18, 26, 34), strict=True))
    assert ends == dict(zip(order, (26, 34, 42, 50), strict=True))
    assert 0 <= controller.progress()["gate"] <= 1


def test_a_step_before_the_calibration_may_be_anything() -> None:
    model = small()
    config = TaperConfig(calibration="batch", calibration_steps=3, start_step=10, end_step=20, scale_loss=0.1)
    controller = taper_(model, config, steps=20)
    ids = torch.randint(60, (2, 8))
    for step in range(12):
        kept = model.model.embed_tokens.weight.detach().clone()
        if step == 2:  # as a loop with a GradScaler skips it
            with torch.no_grad():
                model.model.embed_tokens.weight.fill_(float("inf"))
        model.train()(ids)
        controller.step()
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(kept)
    assert torch.isfinite(controller.target)
    model(ids)
    assert torch.isfinite(torch.as_tensor(controller.auxiliary_loss()))


@pytest.mark.parametrize("stop", [5, 15, 30])
@pytest.mark.parametrize("options", [{"order": True}, {"calibration": "batch", "calibration_steps": 4}])
def test_stopped_and_resumed_runs_have_the_same_numbers(stop: int, options: dict[str, Any]) -> None:
    model = small()
    if "order" in options:
        options = {"order": tuple(site.name for site in find_norms(model) if site.role == "pre")}
    config = TaperConfig(warmup=0.2, **options)
    twin = copy.deepcopy(model)
    whole = taper_(model, config, steps=40)
    losses = train(model, whole, 40, torch.optim.SGD(model.parameters(), lr=1e-2))
    first = taper_(twin, config, steps=40)
    begun = train(twin, first, stop, torch.optim.SGD(twin.parameters(), lr=1e-2))
    state, weights = first.state_dict(), twin.state_dict()
    again = small()
    second = taper_(again, config, steps=40)
    again.load_state_dict(weights)
    second.load_state_dict(state)
    rest = train(again, second, 40 - stop, torch.optim.SGD(again.parameters(), lr=1e-2))
    assert begun + rest == losses
    assert all(float(norm.gate) == 0 for norm in tapered(again))


def test_an_order_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="order must name every tapered site once: a is only in order"):
        taper_(small(), TaperConfig(order=("a",), scale_loss=0), steps=20)
    with pytest.raises(ConfigError, match="names a site twice"):
        TaperConfig(order=("a", "a"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("preset", ["llama", "gpt"])
def test_the_short_cut_at_gate_zero_gives_the_same_bits(preset: str, dtype: torch.dtype) -> None:
    model = small(preset)
    taper_(model, TaperConfig(scale_loss=0), steps=20).close()
    scramble(model)
    model = model.to(dtype).eval()
    for norm in tapered(model):
        norm.gate.zero_()
        norm.gate_eval.zero_()
        norm.scale.fill_(0.6)
        x = torch.randn(3, 5, 32).to(dtype)
        with torch.no_grad():
            short = norm(x)
        assert torch.equal(short, norm(x).detach())  # with gradients the whole mixture is computed
        norm.train()
        with torch.no_grad():
            assert torch.equal(norm(x), short)
        norm.eval()
