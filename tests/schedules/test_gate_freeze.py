"""AutoNorm-S: what is monitored, what the rules decide, and that a frozen gate stays what it was."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normsmith as ns
from normsmith.diagnostics import gate_report
from normsmith.errors import DivergedError, InputError
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.norms.autonorm import AutoNorm
from normsmith.schedules import GateController, GateFreezeConfig, schedules
from normsmith.studies.arms import arm_recipe
from normsmith.studies.recipe import Recipe
from normsmith.training import NormsmithCallback, Trainer
from tests.conftest import scramble
from tests.training.runs import arguments, windows

SIZES = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
HALF = math.log(2) / 2


def model(**options: Any) -> NormsmithForCausalLM:
    torch.manual_seed(0)
    made = NormsmithForCausalLM(preset_config("llama", **SIZES, norm={"kind": "autonorm", **options}))
    return scramble(made, 0.3).train()  # pyright: ignore[reportReturnType]


def gates(module: nn.Module) -> dict[str, AutoNorm]:
    return {name: m for name, m in module.named_modules() if isinstance(m, AutoNorm)}


def batches(count: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(64, (2, 8), generator=generator) for _ in range(count)]


def train(made: Any, controller: GateController, optimizer: torch.optim.Optimizer, data: list[Tensor]) -> None:
    for ids in data:
        made(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        controller.step()


def selectors(made: nn.Module) -> dict[str, Tensor]:
    return {f"{n}.{k}": p for n, norm in gates(made).items() for k, p in norm.named_parameters(recurse=False)}


def decide_gates(made: nn.Module, sharp: list[bool]) -> None:
    """Gates whose weights are 0.999/0.001 for every token, or nearly equal."""
    for norm, is_sharp in zip(gates(made).values(), sharp, strict=True):
        with torch.no_grad():
            norm.selector_out.mul_(1e-3)
            norm.selector_out_shift.copy_(torch.tensor([7.0, 0.0]) if is_sharp else torch.zeros(2))


OPEN, SHARP = [False] * 5, [True] * 5
MIXED = [True, False, True, True, True]


@pytest.mark.parametrize(
    ("rule", "scope", "sharp", "frozen"),
    [
        ("not_below", "model", OPEN, [1] * 5),
        ("not_below", "model", SHARP, [0] * 5),
        ("below", "model", OPEN, [0] * 5),
        ("below", "model", SHARP, [1] * 5),
        ("always", "model", OPEN, [1] * 5),
        ("always", "model", SHARP, [1] * 5),
        ("never", "model", OPEN, [0] * 5),
        ("never", "model", SHARP, [0] * 5),
        ("not_below", "model", MIXED, [0] * 5),  # the mean over the sites is below
        ("below", "model", MIXED, [1] * 5),
        ("not_below", "site", MIXED, [0, 1, 0, 0, 0]),
        ("below", "site", MIXED, [1, 0, 1, 1, 1]),
    ],
)
def test_what_the_rules_decide(rule: Any, scope: Any, sharp: list[bool], frozen: list[int]) -> None:
    made = model()
    decide_gates(made, sharp)
    controller = ns.freeze_gates_(made, {"rule": rule, "scope": scope, "freeze": 0.5}, steps=4)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
    train(made, controller, optimizer, batches(1))
    assert [float(norm.frozen) for norm in gates(made).values()] == [0] * 5, "T_freeze is after step 2"
    train(made, controller, optimizer, batches(1))
    now = list(gates(made).values())
    assert [float(norm.frozen) for norm in now] == frozen
    assert [float(norm.noise) for norm in now] == [1 - f for f in frozen]
    for norm, is_frozen in zip(now, frozen, strict=True):
        assert [p.requires_grad for p in norm.selector_parameters()] == [not is_frozen] * 4
        assert all(p.requires_grad for p in norm.candidates.parameters())
    train(made, controller, optimizer, batches(2))
    assert [float(norm.frozen) for norm in now] == frozen, "one decision in a run"


def test_the_threshold_decides_on_the_entropy_that_was_measured() -> None:
    made = model()
    controller = ns.freeze_gates_(made, {"rule": "never", "freeze": 1.0, "momentum": 0.3}, steps=6)
    measured: list[list[float]] = []
    for ids in batches(6):
        seen: list[float] = []

        def look(norm: AutoNorm, args: tuple[Tensor], seen: list[float] = seen) -> None:
            w = norm.weights(args[0].detach()).detach().double()
            seen.append(float(-(w * w.log()).sum(-1).mean()))

        handles = [norm.register_forward_pre_hook(look) for norm in gates(made).values()]
        train(made, controller, torch.optim.SGD(made.parameters(), lr=0.1), [ids])
        for handle in handles:
            handle.remove()
        measured.append(seen)
    expected, share = torch.zeros(5), 0.0
    for row in measured:
        expected, share = 0.7 * expected + 0.3 * torch.tensor(row), 0.7 * share + 0.3
    entropy = [gate.entropy for gate in controller.gates()]
    torch.testing.assert_close(torch.tensor(entropy), expected / share, rtol=1e-4, atol=1e-5)
    value = sum(entropy) / 5
    for threshold, frozen in ((value * 0.999, 1.0), (value * 1.001, 0.0)):
        again = model()
        exact = ns.freeze_gates_(again, {"entropy": threshold, "freeze": 1.0, "momentum": 0.3}, steps=6)
        train(again, exact, torch.optim.SGD(again.parameters(), lr=0.1), batches(6))
        assert exact.progress()["gate_frozen"] == frozen


def test_nothing_is_reported_before_it_is_measured() -> None:
    made = model()
    controller = ns.freeze_gates_(made, {"start": 0.3, "freeze": 0.6}, steps=10)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
    for step in range(5):
        logged, report = controller.progress(), gate_report(controller)
        seen = step > 3
        assert ("gate_entropy" in logged, "gate_weight_dyt" in logged) == (seen, seen)
        assert all((site["entropy"] is None, site["chosen"] is None) == (not seen, not seen)
                   for site in report.to_dict()["sites"])  # fmt: skip
        assert ("–" in str(report)) != seen
        train(made, controller, optimizer, batches(1))
    assert 0.3 < controller.progress()["gate_entropy"] < math.log(2)


def test_entropy_before_start_does_not_count() -> None:
    made = model()
    decide_gates(made, SHARP)
    controller = ns.freeze_gates_(made, {"start": 0.5, "freeze": 1.0, "rule": "not_below"}, steps=4)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
    train(made, controller, optimizer, batches(2))
    assert float(controller.samples) == 0
    decide_gates(made, OPEN)
    train(made, controller, optimizer, batches(2))
    assert controller.progress()["gate_frozen"] == 1


@pytest.mark.parametrize("mode", ["deterministic", "static"])
def test_a_frozen_gate_keeps_its_selector_while_the_rest_trains(mode: str) -> None:
    """Through AdamW with weight decay on everything, momentum of earlier steps, and gradients that are zeroed."""
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, weight_decay=0.5)
    controller = ns.freeze_gates_(made, {"rule": "always", "freeze": 0.5, "mode": mode}, steps=6)
    train(made, controller, optimizer, batches(3))
    kept = {name: p.clone() for name, p in selectors(made).items()}
    moments = {name: optimizer.state[p]["step"].clone() for name, p in selectors(made).items()}
    others = {n: p.clone() for n, p in made.named_parameters() if n not in kept}
    train(made, controller, optimizer, batches(3, seed=2))
    for name, p in selectors(made).items():
        assert torch.equal(p, kept[name])
        assert torch.equal(optimizer.state[p]["step"], moments[name])
    assert all(not torch.equal(p, others[n]) for n, p in made.named_parameters() if n in others)
    assert any("candidates" in name for name in others), "the candidates go on training"


def test_a_frozen_gate_in_training_is_the_soft_mix_of_evaluation() -> None:
    made = model()
    controller = ns.freeze_gates_(made, {"rule": "always", "freeze": 0.5}, steps=2)
    ids = batches(1)[0]
    assert not torch.equal(made(ids).logits, made(ids).logits)
    train(made, controller, torch.optim.SGD(made.parameters(), lr=0.0), batches(1))
    assert torch.equal(made(ids).logits, made(ids).logits)
    assert torch.equal(made.train()(ids).logits, made.eval()(ids).logits)


def test_a_static_gate_is_reported_as_it_is_applied() -> None:
    made = model()
    controller = ns.freeze_gates_(made, {"rule": "always", "freeze": 0.25, "mode": "static"}, steps=8)
    train(made, controller, torch.optim.SGD(made.parameters(), lr=0.5), batches(8))
    for gate, norm in zip(controller.gates(), controller.sites.values(), strict=True):
        assert gate.weights == tuple(norm.static_weights.tolist())
        assert gate.entropy == pytest.approx(-sum(w * math.log(w) for w in gate.weights), rel=1e-6)


def test_a_static_gate_is_the_running_mean_of_the_weights() -> None:
    made = model()
    free = ns.freeze_gates_(watched := copy.deepcopy(made), {"rule": "never"}, steps=4)
    torch.manual_seed(3)  # the same noise for both
    train(watched, free, torch.optim.SGD(watched.parameters(), lr=0.0), batches(2))
    controller = ns.freeze_gates_(made, {"rule": "always", "freeze": 0.5, "mode": "static"}, steps=4)
    torch.manual_seed(3)
    train(made, controller, torch.optim.SGD(made.parameters(), lr=0.0), batches(2))
    for gate, norm in zip(free.gates(), gates(made).values(), strict=True):
        torch.testing.assert_close(norm.static_weights, torch.tensor(gate.weights), rtol=1e-5, atol=1e-6)
        x = torch.randn(2, 5, 16)
        mixed = sum(w * c(x) for w, c in zip(norm.static_weights, norm.candidates, strict=True))
        for mode in (True, False):
            torch.testing.assert_close(norm.train(mode)(x), mixed)


def test_the_temperature_falls_geometrically_and_stops_with_the_gate() -> None:
    made = model(tau=2.0, tau_end=0.5, hard=False)
    controller = ns.freeze_gates_(made, {"rule": "always", "freeze": 0.5}, steps=4)
    optimizer, seen = torch.optim.SGD(made.parameters(), lr=0.0), []
    for ids in batches(4):
        train(made, controller, optimizer, [ids])
        seen.append(controller.progress()["gate_tau"])
    assert seen == pytest.approx([2 * 0.25**0.25, 2 * 0.25**0.25, 2 * 0.25**0.25, 2 * 0.25**0.25])
    other = model(tau=2.0, tau_end=0.5)
    controller = ns.freeze_gates_(other, {"rule": "never"}, steps=4)
    for _ in range(4):
        controller.step()
    assert {float(norm.tau) for norm in gates(other).values()} == {0.5}


@pytest.mark.parametrize("mode", ["deterministic", "static"])
@pytest.mark.parametrize("stop", [2, 4])
def test_a_resumed_run_equals_one_that_went_through(mode: str, stop: int) -> None:
    config, data = {"rule": "always", "freeze": 0.5, "mode": mode}, batches(6)
    whole = model(tau_end=0.2)
    controller = ns.freeze_gates_(whole, config, steps=6)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    train(whole, controller, optimizer, data[:stop])
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    state = json.loads(json.dumps(controller.state_dict()))
    noise = torch.get_rng_state()
    train(whole, controller, optimizer, data[stop:])

    again = model(tau_end=0.2)
    controller = ns.freeze_gates_(again, config, steps=6)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    controller.load_state_dict(state)
    torch.set_rng_state(noise)
    train(again, controller, optimizer, data[stop:])
    for (name, a), b in zip(whole.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_the_trainer_logs_and_resumes(tmp_path: Path) -> None:
    def run(folder: str, resume: str | None = None) -> Trainer:
        made = model()
        controller = ns.freeze_gates_(made, {"rule": "always", "freeze": 0.5})
        args = arguments(tmp_path / folder, max_steps=4, save_every=3, weight_decay=0.1)
        trainer = Trainer(made, args, train_dataset=windows(64), controller=controller)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    first = run("a")
    logged = [entry for entry in first.state.log_history if "gate_entropy" in entry]
    assert [entry["gate_frozen"] for entry in logged] == [0, 1, 1, 1]
    assert all(0 < entry["gate_entropy"] < math.log(2) for entry in logged)
    assert all(entry["gate_weight_layernorm"] + entry["gate_weight_dyt"] == pytest.approx(1) for entry in logged)
    second = run("b", str(tmp_path / "a/checkpoint-3"))
    for (name, a), b in zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not any(p.requires_grad for p in selectors(second.model).values())


def test_a_model_that_was_frozen_before_stays_so_and_resumes_with_its_optimizer(tmp_path: Path) -> None:
    made = model()
    controller = ns.freeze_gates_(made, {"rule": "always", "freeze": 0.5}, steps=2)
    train(made, controller, torch.optim.SGD(made.parameters(), lr=0.1), batches(1))
    made.save_pretrained(tmp_path)
    again = NormsmithForCausalLM.from_pretrained(tmp_path).train()
    kept = {name: p.clone() for name, p in selectors(again).items()}
    controller = ns.freeze_gates_(again, {"rule": "never"}, steps=4)
    assert all(p.requires_grad for p in selectors(again).values()), "until the optimiser is made and restored"
    assert controller.stops_parameters, "which DistributedDataParallel must know"
    train(again, controller, torch.optim.SGD(again.parameters(), lr=0.1), batches(3))
    assert all(torch.equal(p, kept[name]) for name, p in selectors(again).items())
    assert not any(p.requires_grad for p in selectors(again).values())


def test_the_checkpoint_of_another_schedule_is_refused() -> None:
    state = ns.freeze_gates_(model(), {"entropy": 0.2}, steps=10).state_dict()
    with pytest.raises(InputError, match="another entropy"):
        ns.freeze_gates_(model(), steps=10).load_state_dict(state)
    with pytest.raises(InputError, match="run of 10 steps, this run has 20"):
        ns.freeze_gates_(model(), {"entropy": 0.2}, steps=20).load_state_dict(state)
    three = ns.freeze_gates_(model(candidates=["layernorm", "rmsnorm", "dyt"]), {"entropy": 0.2}, steps=10)
    with pytest.raises(InputError, match="watched 5 gates of up to 2 candidates, this model has 5 of up to 3"):
        three.load_state_dict(state)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"entropy": 0.7}, r"entropy=0.7 is not below ln 2 = 0.693"),
        ({"entropy": 0.0}, "entropy = 0.0.*greater than 0"),
        ({"freeze_step": 11}, "freeze_step=11 lies beyond the run of 10 steps"),
        ({"freeze": 1.5}, "freeze = 1.5.*less than or equal to 1"),
        ({"start": 0.5}, "freeze=0.1 must lie after start=0.5"),
        ({"start": 0.1, "freeze_step": 1}, "monitoring begins after step 1"),
        ({"freeze": 0.5, "freeze_step": 4}, "freeze=0.5 and freeze_step=4 both say when; leave one out"),
        ({"rule": "sometimes"}, "rule = 'sometimes'"),
    ],
)
def test_bad_schedules_are_one_clear_sentence(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ns.freeze_gates_(model(), config, steps=10)


def test_what_cannot_be_frozen_says_why() -> None:
    plain = NormsmithForCausalLM(preset_config("llama", **SIZES))
    with pytest.raises(InputError, match="no autonorm with a selector"):
        ns.freeze_gates_(plain)
    with pytest.raises(InputError, match=r"write steps=100\?"):
        ns.freeze_gates_(model(), 100)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="does not know how long the run is"):
        ns.freeze_gates_(model()).step()
    controller = ns.freeze_gates_(model(), steps=10)
    with pytest.raises(InputError, match="no entropy was measured by step 1"):
        controller.step()


def test_gates_of_a_run_that_diverged_say_so() -> None:
    """The step's end comes before the log, where the Trainer would see it: not a mistake of the user's."""
    made = model()
    controller = ns.freeze_gates_(made, steps=10)
    with torch.no_grad():
        made.get_parameter("model.embed_tokens.weight").fill_(math.nan)
    made.train()(input_ids=batches(1)[0])
    with pytest.raises(DivergedError, match=r"the entropy of model\..* is not finite by step 1"):
        controller.step()


def test_thresholds_follow_the_number_of_candidates() -> None:
    config = GateFreezeConfig()
    for count in (2, 3, 7):
        assert config.threshold(count) == pytest.approx(math.log(count) / 2)
    assert config.span(1000) == (0, 100)
    assert config.span(3) == (0, 1)
    for rule, below in itertools.product(("not_below", "below"), (True, False)):
        entropy = HALF - 1e-9 if below else HALF  # equal counts as not below
        assert GateFreezeConfig(rule=rule).freezes(entropy, HALF) is ((rule == "below") == below)


def test_arms_and_recipes_name_the_schedule() -> None:
    recipe = arm_recipe(Recipe(), "autonorm:candidates=layernorm/rmsnorm,tau=2+gate_freeze:rule=always,mode=static")
    assert isinstance(recipe.schedule, GateFreezeConfig)
    assert (recipe.schedule.rule, recipe.schedule.mode) == ("always", "static")
    assert Recipe(**recipe.to_dict()) == recipe
    assert "gate_freeze" in schedules
    with pytest.raises(InputError, match="beyond the run"):
        recipe.changed(schedule={"kind": "gate_freeze", "freeze_step": 10_000})


def test_the_report_lists_every_gate() -> None:
    made = model()
    controller = ns.freeze_gates_(made, {"rule": "always", "freeze": 0.5}, steps=2)
    train(made, controller, torch.optim.SGD(made.parameters(), lr=0.0), batches(1))
    report = gate_report(controller)
    assert [gate.site for gate in report.gates] == list(gates(made))
    text = str(report)
    assert "model.layers.1.mlp_connection.norm" in text
    assert "layernorm" in text
    assert "frozen" in text
    assert json.loads(json.dumps(report.to_dict()))["sites"][0]["chosen"] in ("layernorm", "dyt")


def test_the_callback_carries_the_state() -> None:
    controller = ns.freeze_gates_(model(), steps=4)
    state = NormsmithCallback(controller).state()
    assert state["attributes"]["controller_state"]["config"]["kind"] == "gate_freeze"
