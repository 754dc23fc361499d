"""Gates that have settled become the plain norm they chose: exactly, or with a measured difference, or not at all."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import normsmith as ns
from normsmith.errors import InputError
from normsmith.models import NormsmithForCausalLM, NormsmithModel, preset_config
from normsmith.norms.autonorm import AutoNorm
from normsmith.norms.dyt import DyT
from normsmith.norms.layernorm import LayerNorm
from normsmith.surgery.load import load_model
from tests.conftest import scramble
from tests.tiny import apart, example, output, same_state, state, tiny

SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def model(seed: int = 0, **options: Any) -> NormsmithForCausalLM:
    torch.manual_seed(seed)
    made = NormsmithForCausalLM(preset_config("gpt", **SIZES, norm={"kind": "autonorm", **options}))
    return scramble(made, 0.4).eval()  # pyright: ignore[reportReturnType]


def gates(module: nn.Module) -> dict[str, AutoNorm]:
    return {name: m for name, m in module.named_modules() if isinstance(m, AutoNorm)}


def lean(norm: AutoNorm, *shift: float) -> None:
    """Logits that hardly depend on the input: these."""
    with torch.no_grad():
        norm.selector_out.mul_(1e-2)
        norm.selector_out_shift.copy_(torch.tensor(shift))


def make_static(norm: AutoNorm, *weights: float) -> None:
    norm.static_weights.copy_(torch.tensor(weights))
    for name in ("static", "frozen"):
        getattr(norm, name).fill_(1)
    norm.noise.fill_(0)


IDS = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(made: nn.Module, ids: Tensor = IDS) -> Tensor:
    return made(ids).logits


def test_certain_static_gates_collapse_to_the_bit() -> None:
    made = model()
    for i, norm in enumerate(gates(made).values()):
        make_static(norm, *((1.0, 0.0) if i % 2 else (0.0, 1.0)))
    before = logits(made)
    chosen = [norm.candidates[int(norm.static_weights.argmax())] for norm in gates(made).values()]
    report = ns.collapse_(made, {"input_ids": IDS})
    assert torch.equal(logits(made), before)
    assert report.error == 0
    assert [c.max_deviation for c in report.collapsed] == [0.0] * 5
    assert [c.chosen for c in report.collapsed] == ["dyt", "layernorm", "dyt", "layernorm", "dyt"]
    assert "0 (exact)" in str(report)
    now = [m for m in made.modules() if isinstance(m, LayerNorm | DyT)]
    assert [type(m) for m in now] == [DyT, LayerNorm, DyT, LayerNorm, DyT]
    for new, old in zip(now, chosen, strict=True):
        assert [id(p) for p in new.parameters()] == [id(p) for p in old.parameters()]
    assert not any("selector" in name for name, _ in made.named_parameters())


def test_an_argmax_gate_with_one_winner_collapses_to_the_bit() -> None:
    made = model(evaluation="argmax")
    for norm in gates(made).values():
        lean(norm, 0.3, 0.0)  # a mean weight of 0.57, and layernorm everywhere
    before = logits(made)
    assert ns.collapse_(made, {"input_ids": IDS}).error == 0
    assert torch.equal(logits(made), before)
    assert not gates(made)


def test_an_argmax_gate_with_two_winners_is_kept() -> None:
    made = model(evaluation="argmax", candidates=["layernorm", "rmsnorm"])
    names = list(gates(made))
    for norm in gates(made).values():
        lean(norm, 9.0, 0.0)
    free = gates(made)[names[0]]
    with torch.no_grad():
        free.selector_out.mul_(1e4)
        for shift in (free.selector_in_shift, free.selector_out_shift):
            shift.zero_()
    report = ns.collapse_(made, {"input_ids": IDS})
    assert [name for name, _ in report.kept] == [names[0]]


def test_the_difference_of_an_input_dependent_gate_is_measured() -> None:
    made = model(candidates=["layernorm", "rmsnorm"])
    for norm in gates(made).values():
        lean(norm, 3.0, 0.0)  # 0.95 for layernorm
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        norm.register_forward_hook(lambda m, args, y, name=name: seen.update({name: (args[0].double(), y.double())}))
        for name, norm in gates(made).items()
    ]
    before = logits(made)
    for handle in handles:
        handle.remove()
    report = ns.collapse_(made, {"input_ids": IDS})
    assert len(report.collapsed) == 5
    for collapsed in report.collapsed:
        x, y = seen[collapsed.site]
        x, y = x.detach(), y.detach()
        new = made.get_submodule(collapsed.site).reference(x).detach()  # pyright: ignore[reportCallIssue]
        rows = (new - y).norm(dim=-1) / y.norm(dim=-1)
        assert collapsed.mean_deviation == pytest.approx(float((new - y).norm() / y.norm()), rel=1e-3)
        assert collapsed.max_deviation == pytest.approx(float(rows.max()), rel=1e-3)
        assert collapsed.weight == pytest.approx(0.9526, abs=5e-3)
        assert 1e-3 < collapsed.mean_deviation < collapsed.max_deviation
    assert report.error == pytest.approx(apart(logits(made), before), rel=0.1)


def test_a_candidate_that_pools_knows_the_padding_after_the_collapse() -> None:
    made = tiny("bert")
    candidates = ["layernorm", {"kind": "film", "pool": "sequence"}]
    ns.swap_norms_(made, {"kind": "autonorm", "candidates": candidates}, example=example(made))
    scramble(made, 0.7)
    for norm in gates(made).values():
        make_static(norm, 0.0, 1.0)
    inputs = example(made)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][:, 8:] = 0
    real = inputs["attention_mask"] != 0
    with torch.no_grad():
        before = made(**inputs)[0]
        report = ns.collapse_(made, inputs)
        assert [c.max_deviation for c in report.collapsed] == [0.0] * len(report.collapsed)
        assert torch.equal(made(**inputs)[0][real], before[real])
        ns.restore_(made)
        assert torch.equal(made(**inputs)[0], before)


def test_what_has_not_settled_stays_with_the_reason() -> None:
    made = model()
    names = list(gates(made))
    for i, norm in enumerate(gates(made).values()):
        lean(norm, 4.0 if i == 1 else 0.4, 0.0)
    report = ns.collapse_(made, {"input_ids": IDS})
    assert [c.site for c in report.collapsed] == [names[1]]
    assert [name for name, _ in report.kept] == [n for n in names if n != names[1]]
    assert "has not settled (layernorm 0.60, dyt 0.40)" in str(report)
    assert list(gates(made)) == [n for n in names if n != names[1]]
    forced = ns.collapse_(made, {"input_ids": IDS}, force=True)
    assert len(forced.collapsed) == 4
    assert not gates(made)


def test_nothing_settled_is_an_error_that_leaves_the_model_as_it_was() -> None:
    made = model()
    for norm in gates(made).values():
        lean(norm, 0.1, 0.0)
    before, kept = state(made), logits(made)
    with pytest.raises(InputError, match=r"no gate has settled.*\n.*\n.*\n.*has not settled \(layernorm 0.5"):
        ns.collapse_(made, {"input_ids": IDS})
    assert same_state(made, before)
    assert torch.equal(logits(made), kept)


def test_an_error_on_the_way_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    for norm in gates(made).values():
        lean(norm, 9.0, 0.0)
    before, modules = logits(made), [type(m) for m in made.modules()]

    def fails(self: Any, x: Tensor) -> Tensor:
        raise RuntimeError("no")

    calls = 0
    plain = LayerNorm.forward

    def later(self: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return plain(self, x) if calls <= 15 else fails(self, x)  # 5 sites twice, and 5 measurements

    monkeypatch.setattr(LayerNorm, "forward", later)
    with pytest.raises(RuntimeError, match="no"):
        ns.collapse_(made, {"input_ids": IDS})
    monkeypatch.undo()
    assert [type(m) for m in made.modules()] == modules
    assert torch.equal(logits(made), before)


def test_a_static_mix_loses_its_selector_and_nothing_else(tmp_path: Path) -> None:
    made = model()
    for norm in gates(made).values():
        make_static(norm, 0.4, 0.6)
    before = logits(made)
    report = ns.collapse_(made, {"input_ids": IDS})
    assert torch.equal(logits(made), before)
    assert "static mix without selector (layernorm 0.40, dyt 0.60)" in str(report)
    assert not any("selector" in name for name, _ in made.named_parameters())
    assert all(norm.config.gate == "static" for norm in gates(made).values())
    made.save_pretrained(tmp_path)
    assert torch.equal(logits(NormsmithForCausalLM.from_pretrained(tmp_path).eval()), before)
    with pytest.raises(InputError, match="no gate has settled"):
        ns.collapse_(made, {"input_ids": IDS})


def test_restore_takes_a_collapse_back_to_the_bit() -> None:
    made = model()
    for norm in gates(made).values():
        lean(norm, 4.0, 0.0)
    before, kept, calls = state(made), logits(made), list[str]()
    name = next(iter(gates(made)))
    made.get_submodule(name).register_forward_hook(lambda *_: calls.append(name))
    ns.collapse_(made, {"input_ids": IDS})
    calls.clear()
    logits(made)
    assert calls == [name], "hooks of the site go along"
    ns.restore_(made)
    calls.clear()
    assert torch.equal(logits(made), kept)
    assert calls == [name], "and fire once"
    assert same_state(made, before)


@pytest.mark.parametrize(("chosen", "logit"), [("layernorm", (6.0, 0.0)), ("dyt", (0.0, 6.0))])
def test_a_collapsed_model_folds_and_reloads(chosen: str, logit: tuple[float, float], tmp_path: Path) -> None:
    made = model()
    for norm in gates(made).values():
        lean(norm, *logit)
    assert {site.chosen for site in ns.collapse_(copy.deepcopy(made), {"input_ids": IDS}).collapsed} == {chosen}
    ns.collapse_(made, {"input_ids": IDS})
    before = logits(made)
    report = ns.fold_(made, "affine", example={"input_ids": IDS})
    assert len(report.absorbed) == 5
    assert apart(logits(made), before) < 1e-5
    made.save_pretrained(tmp_path)
    assert torch.equal(logits(NormsmithForCausalLM.from_pretrained(tmp_path).eval()), logits(made))


def test_padding_does_not_count() -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "causal": False, "norm": {"kind": "autonorm", "candidates": ["layernorm", "rmsnorm"]}}
    made = scramble(NormsmithModel(preset_config("gpt", **sizes)), 0.4).eval()
    for norm in gates(made).values():
        lean(norm, 2.0, 0.0)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[:, 5:] = 0
    alone = ns.collapse_(copy.deepcopy(made), {"input_ids": IDS[:, :5]}, threshold=0.6)
    beside = ns.collapse_(made, {"input_ids": IDS, "attention_mask": mask}, threshold=0.6)
    for a, b in zip(alone.collapsed, beside.collapsed, strict=True):
        assert b.weight == pytest.approx(a.weight, rel=1e-4)
        assert b.mean_deviation == pytest.approx(a.mean_deviation, rel=1e-3)
        assert b.max_deviation == pytest.approx(a.max_deviation, rel=1e-3)


class Twice(nn.Module):
    """One site that stands at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = AutoNorm(16, candidates=["layernorm", "dyt"])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x) - 3 * x)


def test_a_site_that_is_called_twice_is_judged_by_both_calls() -> None:
    torch.manual_seed(0)
    made, x = Twice().eval(), torch.randn(4, 16)
    with torch.no_grad():
        made.norm.selector_out.mul_(30)
        first = made.norm(x) - 3 * x
        weights = (made.norm.weights(x).mean(0) + made.norm.weights(first).mean(0)) / 2
        outputs = [made.norm(x), made.norm(first)]
        chosen = made.norm.candidates[int(weights.argmax())]
        lost = [(chosen(v) - y).square().sum() for v, y in zip((x, first), outputs, strict=True)]
        size = sum(y.square().sum() for y in outputs)
    assert apart(made.norm.weights(x).mean(0), made.norm.weights(first).mean(0)) > 0.1
    report = ns.collapse_(made, x, force=True)
    assert report.collapsed[0].weight == pytest.approx(float(weights.max()), rel=1e-4)
    assert report.collapsed[0].mean_deviation == pytest.approx(float((sum(lost) / size).sqrt()), rel=1e-3)


def test_modes_and_optimiser_are_kept() -> None:
    made = model().train()
    made.model.layers[0].eval()
    modes = {name: m.training for name, m in made.named_modules() if isinstance(m, AutoNorm)}
    for norm in gates(made).values():
        lean(norm, 6.0, 0.0)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    ns.collapse_(made, {"input_ids": IDS})
    assert {name: made.get_submodule(name).training for name in modes} == modes
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert all(id(p) in held for p in made.parameters())


@pytest.mark.parametrize("threshold", [0.5, 1.01, -1.0])
def test_a_threshold_is_a_majority(threshold: float) -> None:
    with pytest.raises(InputError, match=r"above 0.5 and at most 1"):
        ns.collapse_(model(), threshold=threshold)


def test_a_model_without_gates_or_values_says_so() -> None:
    with pytest.raises(InputError, match="no autonorm in this model"):
        ns.collapse_(NormsmithForCausalLM(preset_config("gpt", **SIZES)))
    with torch.device("meta"), pytest.raises(InputError, match=r"model\.layers\.0.*has no values"):
        ns.collapse_(NormsmithForCausalLM(preset_config("gpt", **SIZES, norm="autonorm")))


LOADER = """
import sys, torch, transformers
sys.modules["normsmith"] = None
for folder in sys.argv[1:]:
    kept = torch.load(folder + "/kept.pt")
    auto = getattr(transformers, kept["auto"])
    model = auto.from_pretrained(folder, trust_remote_code=True, attn_implementation="eager").eval()
    with torch.no_grad():
        got = model(**kept["input"])[0]
    print(float((got - kept["output"]).abs().max()))
"""


def test_a_foreign_model_with_gates_reloads_without_normsmith(tmp_path: Path) -> None:
    """Per-token gates in a decoder, padded sequences in an encoder, a frozen mix in bfloat16, and a collapsed model."""
    tiny("llama").bfloat16().save_pretrained(tmp_path / "half")
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", attn_implementation="eager").eval()
    models: dict[str, tuple[Any, str]] = {}
    for name, made, norm in (
        ("token", tiny("gpt2"), {"kind": "autonorm", "candidates": ["layernorm", "rmsnorm", "dyt"]}),
        ("sequence", tiny("bert"), {"kind": "autonorm", "pool": "sequence"}),
        ("static", half, {"kind": "autonorm", "tau": 0.3, "hard": False}),
        ("collapsed", tiny("gpt2"), "autonorm"),
    ):
        ns.swap_norms_(made, norm, example=example(made))
        scramble(made, 0.5)
        models[name] = (made, "AutoModelForMaskedLM" if name == "sequence" else "AutoModelForCausalLM")
    for gate in gates(half).values():
        make_static(gate, 0.123456, 0.876544)
    for gate in gates(models["collapsed"][0]).values():
        lean(gate, 8.0, 0.0)
    ns.collapse_(models["collapsed"][0], example(models["collapsed"][0]))
    folders: list[str] = []
    for name, (made, auto) in models.items():
        inputs = example(made)
        if name == "sequence":
            inputs["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
            inputs["attention_mask"][:, 8:] = 0
        made.save_pretrained(tmp_path / name)
        with torch.no_grad():
            torch.save({"input": inputs, "output": made(**inputs)[0], "auto": auto}, tmp_path / name / "kept.pt")
        folders.append(str(tmp_path / name))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LOADER, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [float(line) for line in done.stdout.split()] == [0.0] * 4
    again = load_model(tmp_path / "sequence", trust_remote_code=True)
    assert gates(again).keys() == gates(models["sequence"][0]).keys()
    kept = torch.load(tmp_path / "sequence" / "kept.pt")
    with torch.no_grad():
        assert apart(again(**kept["input"])[0], kept["output"]) < 1e-5  # another implementation of attention
    again.save_pretrained(tmp_path / "twice")
    assert torch.equal(output(load_model(tmp_path / "twice", trust_remote_code=True)), output(again))


def test_an_encoder_decoder_refuses_what_must_know_its_padding() -> None:
    options = {"vocab_size": 60, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
    config = transformers.BartConfig(**options, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32)
    made = transformers.BartForConditionalGeneration(config)
    with pytest.raises(InputError, match="BartForConditionalGeneration is causal"):
        ns.swap_norms_(made, {"kind": "autonorm", "pool": "sequence"})
