"""The taper as a function of progress, and the controller that carries it out."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normsmith.errors import InputError
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.norms.tapered import TaperedNorm
from normsmith.schedules import TaperConfig, TaperController
from normsmith.surgery import taper_
from tests.conftest import scramble

IDS = torch.randint(90, (4, 24), generator=torch.Generator().manual_seed(1))


def small(preset: str = "llama", **changes: Any) -> NormsmithForCausalLM:
    sizes = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.1}
    model = NormsmithForCausalLM(preset_config(preset, **{**sizes, **changes}))
    scramble(model)
    return model.train()


def train(
    model: torch.nn.Module, controller: TaperController, steps: int, optimizer: torch.optim.Optimizer
) -> list[float]:
    losses = []
    for _ in range(steps):
        for micro in IDS.chunk(2):
            loss = model(micro, labels=micro).loss + controller.auxiliary_loss()
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
        losses.append(loss.item())
    return losses


def tapered(model: torch.nn.Module) -> list[TaperedNorm]:
    return [m for m in model.modules() if isinstance(m, TaperedNorm)]


@given(
    warmup=st.floats(0.01, 0.5),
    end=st.floats(0.6, 1.0),
    steps=st.integers(20, 10_000),
    shape=st.sampled_from(["cosine", "linear"]),
)
def test_gate_falls_from_one_to_zero(warmup: float, end: float, steps: int, shape: Any) -> None:
    config = TaperConfig(warmup=warmup, end=end, shape=shape)
    start, stop = config.span(steps)
    gates = [config.gate(k, steps) for k in range(steps + 1)]
    assert all(g == 1 for g in gates[: start + 1])
    assert all(g == 0 for g in gates[stop:])
    assert all(a > b for a, b in zip(gates[start:stop], gates[start + 1 : stop + 1], strict=True))
    middle = (start + stop) / 2
    if middle == int(middle):
        assert gates[int(middle)] == pytest.approx(0.5)


def test_taper_leaves_the_function_unchanged_until_the_warm_up_ends() -> None:
    model = small().eval()
    before = model(IDS).logits
    controller = taper_(model, steps=40)
    assert torch.equal(model(IDS).logits, before)
    assert len(controller.sites) == 4
    assert not isinstance(model.model.norm, TaperedNorm)


def test_warm_up_is_bit_identical_to_the_plain_norm() -> None:
    model = small()
    plain, twin = model, copy.deepcopy(model)
    controller = taper_(twin, TaperConfig(warmup=0.5, scale_loss=0), steps=10)
    for m in (plain, twin):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0)
        for _ in range(5):
            m(IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(p, dict(twin.named_parameters())[n]) for n, p in plain.named_parameters())
    controller.close()


@pytest.mark.parametrize("placement", ["internal", "final", "all"])
@pytest.mark.parametrize("preset", ["llama", "gpt"])
def test_calibration_is_the_moving_least_squares_fit(preset: str, placement: Any) -> None:
    model = small(preset)
    config = TaperConfig(warmup=0.2, placement=placement, momentum=0.3)
    controller = taper_(model, config, steps=20)
    numerators: dict[str, list[float]] = {name: [] for name in controller.sites}
    denominators = copy.deepcopy(numerators)

    def watch(name: str, norm: TaperedNorm) -> Any:
        def hook(module: TaperedNorm, args: Any, output: Any) -> None:
            x = args[0].detach().double()
            x = x - x.mean(-1, keepdim=True) if norm.centred else x
            power = (x * module.gamma.detach().double()).square().sum(-1)
            s = torch.sqrt(x.square().mean(-1) + module.config.eps)
            numerators[name].append(float((power / s).mean()))
            denominators[name].append(float(power.mean()))

        return norm.register_forward_hook(hook)

    handles = [watch(name, norm) for name, norm in controller.sites.items()]
    train(model, controller, 4, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for handle in handles:
        handle.remove()

    def average(values: list[float]) -> float:
        s = 0.0
        per_step = [(a + b) / 2 for a, b in zip(values[::2], values[1::2], strict=True)]  # two micro-batches
        for value in per_step:
            s = 0.7 * s + 0.3 * value
        return s / (1 - 0.7 ** len(per_step))

    for name, norm in controller.sites.items():
        assert float(norm.scale) == pytest.approx(average(numerators[name]) / average(denominators[name]), rel=1e-5)
        assert torch.equal(norm.gamma_tilde, norm.gamma)
        assert norm.gamma_tilde is not norm.gamma


def test_scale_loss_pulls_to_the_frozen_target() -> None:
    model = small()
    controller = taper_(model, TaperConfig(warmup=0.1, scale_loss=0.5), steps=20)
    seen: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, controller, 2, optimizer)
    target = torch.cat([h.square().mean(-1).sqrt().flatten() for h in seen]).mean()
    assert controller.target.item() == pytest.approx(target.item(), rel=1e-5)
    model(IDS, labels=IDS)
    loss = controller.auxiliary_loss()
    scales = seen[-1].square().mean(-1).sqrt()
    torch.testing.assert_close(loss, 0.5 * (scales - controller.target).square().mean(), rtol=1e-4, atol=1e-7)
    assert isinstance(loss, torch.Tensor)
    assert loss.requires_grad
    assert controller.auxiliary_loss() == 0.0, "one forward pass counts once"
    handle.remove()


@pytest.mark.parametrize("evaluate", ["final", "current"])
def test_evaluation_gate(evaluate: Any) -> None:
    model = small()
    controller = taper_(model, TaperConfig(warmup=0.2, evaluate=evaluate), steps=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, controller, 1, optimizer)
    assert all(n.gate_eval == 1 for n in tapered(model))
    train(model, controller, 4, optimizer)
    gate = controller.config.gate(5, 10)
    assert 0 < gate < 1
    assert all(float(n.gate) == pytest.approx(gate) for n in tapered(model))
    assert all(float(n.gate_eval) == pytest.approx(0 if evaluate == "final" else gate) for n in tapered(model))


@pytest.mark.parametrize("stop", [2, 5, 9])
def test_stop_anywhere_and_resume_with_the_same_numbers(stop: int) -> None:
    config = TaperConfig(warmup=0.4, momentum=0.2)

    def start() -> tuple[NormsmithForCausalLM, TaperController, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = small()
        controller = taper_(model, config, steps=10)
        return model, controller, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, controller, optimizer = start()
    whole = train(model, controller, 10, optimizer)
    first, controller, optimizer = start()
    begun = train(first, controller, stop, optimizer)
    states = first.state_dict(), controller.state_dict(), optimizer.state_dict()
    second, controller, optimizer = start()
    second.load_state_dict(states[0])
    controller.load_state_dict(states[1])
    optimizer.load_state_dict(states[2])
    assert begun + train(second, controller, 10 - stop, optimizer) == whole
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), second.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("preset", ["llama", "gpt"])
def test_one_compilation_for_a_whole_taper_and_the_output_follows_the_gate(preset: str) -> None:
    model = small(preset)
    controller = taper_(model, TaperConfig(warmup=0.3), steps=8)
    compilations = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(8):
        reference = copy.deepcopy(model)(IDS, labels=IDS).loss
        loss = compiled(IDS, labels=IDS).loss
        torch.testing.assert_close(loss, reference)
        auxiliary = controller.auxiliary_loss()
        assert (auxiliary != 0) == (controller.completed >= 2)
        (loss + auxiliary).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
    assert len(compilations) == 1
    assert all(n.gate == 0 for n in tapered(model))


def test_padding_free_statistics_survive_a_thousand_bfloat16_steps() -> None:
    model = small().bfloat16()
    controller = taper_(model, TaperConfig(warmup=0.999, momentum=0.01), steps=1002)
    norm = next(iter(controller.sites.values()))
    x = torch.randn(8, 32).bfloat16()
    for _ in range(1000):
        for site in controller.sites.values():
            site(x)
        controller.step()
    wide = x.double()
    power = (wide * norm.gamma.double()).square().sum(-1)
    target = ((power / (wide.square().mean(-1) + 1e-6).sqrt()).mean() / power.mean()).item()
    ratio = controller.moments[0, 0] / controller.moments[0, 1]
    assert ratio.item() == pytest.approx(target, rel=0.01)
    assert not math.isnan(ratio)


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (lambda: small(connection="post"), TaperConfig(), "not a pre-norm model: 3 norms also feed the residual"),
        (lambda: small(connection="sphere"), TaperConfig(), "no pre norm to taper"),
        (lambda: small(norm="identity"), TaperConfig(), "no norm of a known kind"),
        (lambda: small(norm="dyt"), TaperConfig(), "is a dyt; only RMSNorm and LayerNorm"),
        (lambda: small(final_norm="identity"), TaperConfig(), "write scale_loss=0"),
    ],
)
def test_models_that_cannot_be_tapered(model: Any, config: TaperConfig, message: str) -> None:
    made = model()
    before = dict(made.named_modules())
    with pytest.raises(InputError, match=message):
        taper_(made, config, steps=10)
    assert dict(made.named_modules()) == before


def test_schedules_that_make_no_sense() -> None:
    with pytest.raises(InputError, match="end=0.1 must lie after warmup=0.5"):
        TaperConfig(warmup=0.5, end=0.1)
    with pytest.raises(InputError, match="scale_loss = -1"):
        TaperConfig(scale_loss=-1)
    with pytest.raises(InputError, match="unknown key 'warmpu'; did you mean 'warmup'"):
        TaperConfig(**{"warmpu": 0.1})
    with pytest.raises(InputError, match="too short to taper"):
        taper_(small(), steps=1)
    controller = taper_(small())
    with pytest.raises(InputError, match="pass steps="):
        controller.step()


def test_calibration_without_a_forward_pass_and_foreign_checkpoints_are_refused() -> None:
    controller = taper_(small(), TaperConfig(warmup=0.2), steps=10)
    controller.step()
    with pytest.raises(InputError, match="no usable statistics by step 2"):
        controller.step()
    state = taper_(small(), TaperConfig(warmup=0.2), steps=12).state_dict()
    with pytest.raises(InputError, match="a run of 12 steps, this run has 10"):
        controller.load_state_dict(state)
    state = taper_(small(), TaperConfig(warmup=0.3), steps=10).state_dict()
    with pytest.raises(InputError, match="another warmup"):
        controller.load_state_dict(state)
