"""Decoding benchmarks: the right tokens first, then speed; and nothing is reported for models that disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from normsmith.bench import (
    DecodeSpeed,
    bench_decode,
    bench_removal,
    bench_sphere_update,
    bench_training_step,
    decode_family,
    greedy_decode,
    ops,
    step,
)
from normsmith.bench import decode as bench
from normsmith.bench.timing import compiling
from normsmith.errors import InputError, VerificationError
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.norms import Norm
from normsmith.norms.tapered import TaperedNorm
from normsmith.schedules import TaperConfig
from normsmith.surgery import find_norms, taper_
from tests.conftest import scramble
from tests.tiny import apart, output, state, tiny

PROMPT = torch.randint(90, (2, 7), generator=torch.Generator().manual_seed(1))


def small(preset: str = "llama", **changes: Any) -> NormsmithForCausalLM:
    sizes = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
    model = NormsmithForCausalLM(preset_config(preset, **{**sizes, **changes}))
    scramble(model)
    return model.eval()


def at_the_end(preset: str) -> NormsmithForCausalLM:
    """A model whose taper is complete, with norms far from their start."""
    model = small(preset)
    taper_(model, TaperConfig(scale_loss=0), steps=100).close()
    scramble(model)
    for norm in (m for m in model.modules() if isinstance(m, TaperedNorm)):
        norm.scale.fill_(0.5 + torch.rand(()).item())
        norm.gate.zero_()
        norm.gate_eval.zero_()
    return model


def norms_of(model: nn.Module) -> list[str]:
    return [m.config.kind for m in model.modules() if isinstance(m, Norm)]


@pytest.mark.parametrize("preset", ["llama", "gpt"])
def test_greedy_decoding_gives_the_tokens_of_generate(preset: str) -> None:
    model = small(preset)
    tokens, seconds = greedy_decode(model, PROMPT, 12)
    expected = model.generate(PROMPT, max_new_tokens=12, do_sample=False, pad_token_id=0)[:, PROMPT.shape[1] :]
    assert torch.equal(tokens, expected)
    assert len(set(tokens.flatten().tolist())) > 4, "a model that repeats one token would prove little"
    assert seconds > 0


@pytest.mark.parametrize("preset", ["llama", "gpt"])
def test_family_of_a_plain_model(preset: str) -> None:
    model = small(preset)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    family = decode_family(model)
    plain = {"llama": "rmsnorm", "gpt": "layernorm"}[preset]
    assert list(family) == ["baseline", "tapered", "folded", "twin"]
    assert norms_of(family["baseline"]) == [plain] * 5
    assert norms_of(family["tapered"]) == [f"tapered_{plain}"] * 4 + [plain]
    assert norms_of(family["folded"]) == norms_of(family["twin"]) == [plain]
    shapes = [{n: p.shape for n, p in family[name].named_parameters()} for name in ("folded", "twin")]
    assert shapes[0] == shapes[1], "the twin is what the folded model would be had it never had norms"
    assert family["baseline"].num_parameters() == model.num_parameters()  # pyright: ignore
    assert all(not m.training for m in family.values())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items()), "the caller's model is kept"
    bench.check_agreement(family["tapered"], family["folded"], PROMPT, 12, ("tapered", "folded"))


@pytest.mark.parametrize("preset", ["llama", "gpt"])
def test_family_of_a_tapered_checkpoint_keeps_its_weights(preset: str, tmp_path: Path) -> None:
    trained = at_the_end(preset)
    trained.save_pretrained(tmp_path)
    family = decode_family(NormsmithForCausalLM.from_pretrained(tmp_path).eval())
    logits = trained(PROMPT).logits
    torch.testing.assert_close(family["tapered"](PROMPT).logits, logits, rtol=0, atol=0)
    torch.testing.assert_close(family["folded"](PROMPT).logits, logits, rtol=1e-4, atol=1e-4)  # fold's own: float32
    assert "identity" not in norms_of(family["baseline"])
    assert not any(isinstance(m, TaperedNorm) for m in family["baseline"].modules())
    assert len(norms_of(family["baseline"])) == 5
    counts = {name: sum(p.numel() for p in m.parameters()) for name, m in family.items()}
    assert counts["folded"] <= counts["twin"] < counts["baseline"] + (preset == "gpt") * 10**6
    assert counts["folded"] < counts["tapered"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_family_of_a_foreign_model(family: str) -> None:
    model = tiny(family)
    first = state(model)
    models = decode_family(model, fused=True)
    assert list(models) == ["baseline", *(["fused"] if family == "llama" else []), "tapered", "folded", "twin"]
    kinds = {name: [site.role for site in find_norms(m)] for name, m in models.items()}
    assert kinds["baseline"] == kinds["tapered"] == ["pre"] * 4 + ["final"]
    assert kinds["folded"] == kinds["twin"] == ["final"]
    assert torch.equal(output(models["baseline"]), output(model))
    assert apart(output(models["folded"]), output(models["tapered"])) <= 1e-5
    if family == "llama":
        assert sum(type(m) is nn.RMSNorm for m in models["fused"].modules()) == 5
        assert apart(output(models["fused"]), output(model)) <= 1e-6
    assert {n for n, _ in models["twin"].named_parameters()} < set(first), "the twin has no weight of its own"
    assert all(torch.equal(t, first[n]) for n, t in model.state_dict().items()), "the caller's model is kept"


def test_a_foreign_model_that_was_tapered_has_its_norms_back_as_baseline() -> None:
    model = tiny("llama")
    expected = output(model)
    controller = taper_(model, TaperConfig(scale_loss=0), steps=10)
    controller.close()
    for norm in controller.sites.values():
        norm.gate.zero_()
        norm.gate_eval.zero_()
        norm.scale.fill_(0.3)
    family = decode_family(model)
    assert apart(output(family["baseline"]), expected) <= 1e-6
    assert apart(output(family["folded"]), output(model)) <= 1e-5
    assert apart(output(family["folded"]), expected) > 1e-2


@pytest.mark.parametrize("preset", ["llama", "gpt"])
@pytest.mark.parametrize("new_tokens", [2, 12])
def test_a_static_cache_gives_the_same_tokens_every_time(preset: str, new_tokens: int) -> None:
    model = small(preset)
    expected, _ = greedy_decode(model, PROMPT, new_tokens)
    decoder = bench.Decoder(model, PROMPT, new_tokens, "static")
    assert decoder.produced == 2 * (new_tokens - 1)
    for _ in range(2):  # the cache of the first call is used again
        assert torch.equal(decoder()[0], expected)


def test_without_a_cache_one_pass_gives_the_next_token() -> None:
    model = small()
    decoder = bench.Decoder(model, PROMPT, 12, "none")
    token, seconds = decoder()
    assert torch.equal(token, greedy_decode(model, PROMPT, 2)[0][:, :1])
    assert decoder.produced == 2 * bench._PASSES
    assert seconds > 0


@pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning")  # when inductor is imported
def test_a_compiled_step_is_compiled_once_and_agrees() -> None:
    model = small()
    torch._dynamo.reset()
    decoder = bench.Decoder(model, PROMPT, 12, "static", compiled=True)
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    decoder.step = torch.compile(model, backend=count, dynamic=False)
    expected = greedy_decode(model, PROMPT, 12)[0]
    assert torch.equal(decoder()[0], expected)
    assert torch.equal(decoder()[0], expected)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning")  # when inductor is imported
def test_no_model_falls_back_to_eager_code_because_there_are_many() -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def run() -> None:
        for width in range(2, 14):
            torch.compile(nn.Linear(width, 1), backend=count, dynamic=False)(torch.ones(1, width))

    with compiling(12):
        run()
    assert len(graphs) == 12
    with compiling(1), pytest.raises(Exception, match="limit"):
        run()


def test_a_cache_that_gives_other_tokens_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench.Decoder.__call__

    def spoiled(self: bench.Decoder) -> tuple[Tensor, float]:
        tokens, seconds = run(self)
        return (tokens + 1) % 90 if self.cache == "static" else tokens, seconds

    monkeypatch.setattr(bench.Decoder, "__call__", spoiled)
    with pytest.raises(VerificationError, match="only and only with static cache generate different tokens"):
        bench_decode({"only": small()}, PROMPT, new_tokens=4, rounds=1, cache="static")


def test_protocols_that_cannot_be_timed() -> None:
    with pytest.raises(InputError, match="cache 'large': write dynamic, static or none"):
        bench.Decoder(small(), PROMPT, 4, "large")  # pyright: ignore
    with pytest.raises(InputError, match="a cache that grows cannot be compiled"):
        bench.Decoder(small(), PROMPT, 4, compiled=True)
    few = tiny("gpt2", n_positions=16, vocab_size=90)
    assert bench.Decoder(few, PROMPT, 10)()[0].shape == (2, 10)
    with pytest.raises(InputError, match="GPT2LMHeadModel has 16 learned positions, and prompt and new tokens need 17"):
        bench.Decoder(few, PROMPT, 11)
    assert bench.learned_positions(tiny("llama", max_position_embeddings=16)) is None
    with pytest.raises(InputError, match="BertForMaskedLM is no causal language model, so it decodes nothing"):
        decode_family(tiny("bert"))
    config = transformers.T5Config(vocab_size=90, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    t5 = transformers.T5ForConditionalGeneration(config)  # it generates, but from a text that another stack reads
    with pytest.raises(InputError, match="T5ForConditionalGeneration is no causal language model"):
        decode_family(t5)


def test_a_benchmark_leaves_every_module_in_its_mode() -> None:
    model = small().train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    bench_removal(model, find_norms(model), rounds=1)
    assert [module.training for module in model.modules()] == before


def test_an_unfinished_taper_has_no_family() -> None:
    model = at_the_end("llama")
    for norm in (m for m in model.modules() if isinstance(m, TaperedNorm)):
        norm.gate.fill_(0.5)
    with pytest.raises(InputError, match="gate"):
        decode_family(model)


def test_speeds_are_tokens_per_second_relative_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = {"baseline": 0.04, "tapered": 0.02, "folded": 0.01}
    family = {name: model for name, model in decode_family(small()).items() if name in delays}
    names = {id(model): name for name, model in family.items()}
    decode = bench.Decoder.__call__
    ticks: list[int] = []

    def known(self: bench.Decoder) -> tuple[Tensor, float]:
        return decode(self)[0], delays[names[id(self.model)]]

    monkeypatch.setattr(bench.Decoder, "__call__", known)
    speeds = bench_decode(family, PROMPT, new_tokens=5, rounds=3, warmup=0, tick=ticks.append)
    assert [s.name for s in speeds] == list(delays)
    assert [s.median for s in speeds] == pytest.approx([2 * 4 / d for d in delays.values()])
    assert [s.ratio for s in speeds] == pytest.approx([1, 2, 4])
    assert all(s.low == pytest.approx(s.high) == pytest.approx(s.median) for s in speeds)
    assert ticks == [1, 2, 3]


def test_ratios_are_taken_within_rounds_so_that_a_slow_hour_hits_all_alike() -> None:
    slow, fast = (DecodeSpeed("x", 0, 0, 0, 0, seconds) for seconds in ((1.0, 8.0, 8.0), (0.5, 2.0, 1.0)))
    assert fast.relative_to(slow) == 4  # 2, 4, 8, where the medians' quotient is 8


def test_a_real_measurement_is_consistent() -> None:
    speeds = bench_decode(decode_family(small()), PROMPT, new_tokens=4, rounds=3, warmup=1)
    assert [s.name for s in speeds] == ["baseline", "tapered", "folded", "twin"]
    assert speeds[0].ratio == 1
    assert all(0 < s.low <= s.median <= s.high for s in speeds)


@pytest.mark.parametrize("damage", ["another weight", "not a number"])
def test_models_that_disagree_are_not_measured(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = decode_family(at_the_end("llama"))
    with torch.no_grad():
        weight = family["folded"].model.layers[0].mlp.down_proj.weight
        weight.copy_(torch.full_like(weight, torch.nan) if damage == "not a number" else weight * 1.5)
    measured: list[Any] = []
    monkeypatch.setattr(bench, "interleave", lambda *args: measured.append(args))
    with pytest.raises(VerificationError, match="tapered and folded generate different tokens from position"):
        bench_decode(family, PROMPT, new_tokens=24, rounds=1)
    assert measured == []


def test_a_tie_within_rounding_may_be_broken_either_way() -> None:
    class Tie(nn.Module):
        """Two best tokens that lie `gap` apart."""

        def __init__(self, gap: float) -> None:
            super().__init__()
            self.config, self.gap = small().config, gap

        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            logits = torch.zeros(*input_ids.shape, 90)
            logits[..., 3], logits[..., 5] = 2.0, 2.0 + self.gap
            return type("Output", (), {"logits": logits[:, -1:]})

    bench.check_agreement(Tie(-1e-5), Tie(1e-5), PROMPT, 3, ("one", "other"))
    with pytest.raises(VerificationError, match="one and other generate different tokens from position 0"):
        bench.check_agreement(Tie(-1e-2), Tie(1e-2), PROMPT, 3, ("one", "other"))


def test_one_token_cannot_be_timed() -> None:
    with pytest.raises(InputError, match="ask for at least 2"):
        bench_decode({"only": small()}, PROMPT, new_tokens=1)


CASES = [
    "add + layer_norm, eager",
    "add + layer_norm, compiled",
    "sphere update, literal, eager",
    "sphere update, fused, eager",
    "sphere update, fused, compiled",
]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation takes longer than all of these tests; `make bench` does it."""
    monkeypatch.setattr(torch, "compile", lambda function: function)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("p", [1.0, 2.0, torch.inf])
def test_the_sphere_benchmark_runs(p: float) -> None:
    measured = bench_sphere_update(tokens=16, width=12, p=p, rounds=2)
    assert list(measured) == CASES
    assert all(len(t.seconds) == 2 and min(t.seconds) > 0 for t in measured.values())


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("factor", [1.001, torch.nan])
def test_a_wrong_sphere_update_is_not_timed(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    update = ops.sphere_update
    measured: list[Any] = []
    monkeypatch.setattr(ops, "sphere_update", lambda *args: update(*args) * factor)
    monkeypatch.setattr(ops, "interleave", lambda *args, **kwargs: measured.append(args))
    with pytest.raises(VerificationError, match="sphere update, fused, eager differs .*: nothing is timed"):
        bench_sphere_update(tokens=16, width=12, rounds=1)
    assert measured == []


@pytest.mark.parametrize(
    ("arms", "cases"),
    [
        (("pre", "proj", "geo"), ["pre", "proj", "geo"]),
        (
            ("rmsnorm", "taper:end=0.5"),
            ["rmsnorm", "taper:end=0.5, warm-up", "taper:end=0.5, tapering", "taper:end=0.5, after"],
        ),
    ],
)
def test_the_training_step_benchmark_runs(
    arms: tuple[str, ...], cases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[nn.Module, Any]] = []
    make = step.step_case
    monkeypatch.setattr(step, "step_case", lambda *args: made.append(args[:2]) or make(*args))
    measured = bench_training_step(arms, width=24, layers=1, batch=1, sequence=4, rounds=2, compiled=False)
    assert list(measured) == cases
    assert all(min(t.seconds) > 0 for t in measured.values())
    gates = [float(m.gate) for model, _ in made for m in model.modules() if isinstance(m, TaperedNorm)]
    if "rmsnorm" in arms:
        assert gates[:2] == [1, 1]
        assert 0.4 < gates[2] < 0.6
        assert gates[4:] == [0, 0]


def test_the_training_step_benchmark_of_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []
    make = step.step_case
    monkeypatch.setattr(step, "step_case", lambda *args: made.append(args[0]) or make(*args))
    small: dict[str, Any] = {"width": 24, "layers": 1, "batch": 2, "sequence": 4, "rounds": 1, "compiled": False}
    measured = bench_training_step(("layernorm", "autonorm:pool=sequence"), **small, heads=3, images=True)
    assert list(measured) == ["layernorm", "autonorm:pool=sequence"]
    assert [model.config.num_attention_heads for model in made] == [3, 3]  # pyright: ignore
    assert made[0].config.max_position_embeddings == 1 + 4  # pyright: ignore
