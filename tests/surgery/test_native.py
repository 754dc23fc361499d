"""The native format: a changed model reloads as what it is, in a process without normsmith, or not at all."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import normsmith as ns
from normsmith.errors import InputError
from normsmith.norms import norms
from normsmith.norms.tapered import TaperedNorm
from normsmith.surgery.export import export_model
from normsmith.surgery.load import load_model
from normsmith.surgery.native import MODELLING_FILE, changes
from tests.tiny import apart, example, output, state, tiny

# Runs where importing normsmith fails: every folder is loaded and its output compared with the one beside it.
LOADER = """
import sys, torch, transformers
sys.modules["normsmith"] = None
for folder in sys.argv[1:]:
    kept = torch.load(folder + "/kept.pt")
    auto = getattr(transformers, kept["auto"])
    model = auto.from_pretrained(folder, trust_remote_code=True, attn_implementation="eager").eval()
    with torch.no_grad():
        got = model(**kept["example"])[0]
    again = getattr(type(model), "__module__").startswith("transformers_modules")
    print(folder, float((got - kept["output"]).abs().max() / kept["output"].abs().max()), again, got.dtype)
"""
AUTO = {"vit": "AutoModel", "bert": "AutoModelForMaskedLM"}


def fully_tapered(model: Any) -> None:
    """Pre norms tapered to the end, as linear maps with random scales."""
    ns.taper_(model, {"scale_loss": 0.0}, steps=10, example=example(model)).close()
    for norm in (m for m in model.modules() if isinstance(m, TaperedNorm)):
        norm.gate.zero_()
        norm.gate_eval.zero_()
        norm.scale.fill_(0.7)


def fold_full(model: Any) -> None:
    fully_tapered(model)
    ns.fold_(model, example=example(model))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "swap": lambda model: ns.swap_norms_(model, "dyt", where="pre", example=example(model)),
    "affine": lambda model: ns.fold_(model, "affine", example=example(model)),
    "tapered": fully_tapered,
    "full": fold_full,
}
FAMILIES = ("llama", "gpt2", "gemma2", "opt", "qwen3", "vit")


def keep(model: Any, folder: Path, family: str) -> None:
    model.save_pretrained(folder)
    kept = {"example": example(model), "output": output(model), "auto": AUTO.get(family, "AutoModelForCausalLM")}
    torch.save(kept, folder / "kept.pt")


def load_without_normsmith(folders: list[Path]) -> dict[str, tuple[float, bool, str]]:
    command = [sys.executable, "-W", "ignore", "-c", LOADER, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    return {Path(row[0]).name: (float(row[1]), row[2] == "True", row[3]) for row in rows}


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, bool, str]]:
    """Every family with every change, and llama with every registered norm, loaded in one process."""
    base, folders = tmp_path_factory.mktemp("native"), list[Path]()
    for family in FAMILIES:
        for name, change in CHANGES.items():
            model = tiny(family)
            change(model)
            keep(model, base / f"{family}-{name}", family)
            folders.append(base / f"{family}-{name}")
    for kind in norms:
        model = tiny("llama")
        ns.swap_norms_(model, kind)
        keep(model, base / f"norm-{kind}", "llama")
        folders.append(base / f"norm-{kind}")
    for family in ("gemma", "llama"):
        tiny(family).bfloat16().save_pretrained(base / f"{family}-stock")
        # Loaded, because `.bfloat16()` also rounds the rotary frequencies, which loading does not.
        model = transformers.AutoModelForCausalLM.from_pretrained(base / f"{family}-stock", attn_implementation="eager")
        ns.swap_norms_(model, "rmsnorm")
        keep(model, base / f"{family}-bfloat16", family)
        folders.append(base / f"{family}-bfloat16")
    return load_without_normsmith(folders)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_reloads_where_normsmith_is_missing(
    reloaded: dict[str, tuple[float, bool, str]], family: str, change: str
) -> None:
    error, own_code, _ = reloaded[f"{family}-{change}"]
    assert error <= 1e-6
    # Where affine folding made no bias, the stock class says it all.
    assert own_code or change == "affine"


@pytest.mark.parametrize("kind", list(norms))
def test_every_registered_norm_can_be_brought_along(reloaded: dict[str, tuple[float, bool, str]], kind: str) -> None:
    assert reloaded[f"norm-{kind}"][:2] == (0.0, True)


@pytest.mark.parametrize("family", ["gemma", "llama"])
def test_half_precision_keeps_its_rounding(reloaded: dict[str, tuple[float, bool, str]], family: str) -> None:
    """Gemma's 1 + w is a float32 gain in a bfloat16 model, and must be one again."""
    assert reloaded[f"{family}-bfloat16"] == (0.0, True, "torch.bfloat16")


def test_loading_without_permission_fails_instead_of_building_the_old_architecture(tmp_path: Path) -> None:
    model = tiny("llama")
    ns.swap_norms_(model, "dyt")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    with pytest.raises(InputError, match=f"brings its own code \\({MODELLING_FILE}\\).*trust_remote_code=True"):
        load_model(tmp_path)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_change_of_a_part_is_known_to_the_whole(tmp_path: Path, family: str, change: str) -> None:
    """The part knows nothing of the head around it, and the head is what is saved."""
    whole, other = tiny(family), tiny(family)
    part = whole.get_submodule(whole.base_model_prefix)
    CHANGES[change](part)
    whole.save_pretrained(tmp_path / "whole")
    again = load_model(tmp_path / "whole", trust_remote_code=True)
    assert apart(output(again), output(whole)) <= 1e-6
    other.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other" / MODELLING_FILE).exists()
    if change == "swap":
        ns.restore_(part)
        whole.save_pretrained(tmp_path / "restored")
        assert not (tmp_path / "restored" / MODELLING_FILE).exists()


def test_a_change_deep_inside_is_known_to_the_whole(tmp_path: Path) -> None:
    whole = tiny("vit")
    ns.swap_norms_(whole.layers[0], "dyt", example=torch.randn(1, 5, 32))
    whole.save_pretrained(tmp_path)
    again = load_model(tmp_path, trust_remote_code=True)
    assert apart(output(again), output(whole)) <= 1e-6


def test_generation_and_a_second_round_with_normsmith(tmp_path: Path) -> None:
    model = tiny("llama")
    fold_full(model)
    ids, options = example(model)["input_ids"], {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(ids, **options)
    model.save_pretrained(tmp_path / "a")
    again = load_model(tmp_path / "a", trust_remote_code=True)
    assert torch.equal(again.generate(ids, **options), tokens)
    assert torch.equal(again.generate(ids, use_cache=False, **options), tokens)
    ns.swap_norms_(again, "layernorm", where="final", example=example(again))
    assert [site.kind for site in ns.find_norms(again)] == ["layernorm"]
    again.save_pretrained(tmp_path / "b")
    third = load_model(tmp_path / "b", trust_remote_code=True)
    assert torch.equal(output(third), output(again))
    assert type(third.model.norm).__module__.startswith("normsmith")


def test_a_restored_model_is_stock_again(tmp_path: Path) -> None:
    model = tiny("gpt2")
    before, logits = state(model), output(model)
    ns.swap_norms_(model, "dyt", where="pre")
    ns.restore_(model)
    model.save_pretrained(tmp_path / "a")
    again = load_model(tmp_path / "a")
    assert type(again) is transformers.GPT2LMHeadModel
    assert apart(output(again), logits) <= 1e-6
    assert all(torch.equal(before[n], t) for n, t in again.state_dict().items())
    # Also if it was loaded from a native folder in between.
    ns.swap_norms_(model, "layernorm")
    model.save_pretrained(tmp_path / "b")
    native = load_model(tmp_path / "b", trust_remote_code=True)
    for name, module in model.named_modules():
        if type(module).__module__.startswith("normsmith.norms"):
            stock = nn.LayerNorm(32)
            stock.weight, stock.bias = module.gamma, module.beta
            parent, _, leaf = name.rpartition(".")
            setattr(native.get_submodule(parent), leaf, stock)
    native.save_pretrained(tmp_path / "c")
    assert "auto_map" not in json.loads((tmp_path / "c/config.json").read_text())
    torch.testing.assert_close(output(load_model(tmp_path / "c")), logits, rtol=1e-5, atol=1e-6)


def test_changed_eps_survives(tmp_path: Path) -> None:
    """transformers #38025 and its like: an eps changed on the module alone is lost by a plain save."""
    model = tiny("llama")
    model.model.norm.variance_epsilon = 0.5
    assert changes(model)["attributes"] == {"model.norm": {"variance_epsilon": 0.5}}
    export_model(model, tmp_path)
    assert apart(output(load_model(tmp_path, trust_remote_code=True)), output(model)) <= 1e-6


def test_copies_and_pickles_save_themselves(tmp_path: Path) -> None:
    model = tiny("llama")
    ns.swap_norms_(model, "dyt")
    for i, twin in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        with torch.no_grad():
            twin.lm_head.weight.mul_(2)
        twin.save_pretrained(tmp_path / str(i))
        again = load_model(tmp_path / str(i), trust_remote_code=True)
        assert apart(output(again), output(twin)) <= 1e-6
        assert apart(output(again), output(model)) > 0.1


def test_a_trainers_checkpoint_is_native(tmp_path: Path) -> None:
    model = tiny("llama")
    ns.swap_norms_(model, "dyt", where="pre")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, save_steps=1, report_to=[], use_cpu=True, per_device_train_batch_size=2
    )
    ids = example(model)["input_ids"]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    transformers.Trainer(model, arguments, train_dataset=rows).train()  # pyright: ignore[reportArgumentType]
    again = load_model(tmp_path / "checkpoint-1", trust_remote_code=True)
    assert apart(output(again), output(model.eval())) <= 1e-6


def test_what_the_format_cannot_describe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Linear is no class of transformers"):
        export_model(nn.Linear(2, 2), tmp_path)
    model = tiny("llama")
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    with pytest.raises(InputError, match=r"act_fn is a Tanh where LlamaForCausalLM has a SiLU.*norms only"):
        export_model(model, tmp_path)
    model = tiny("llama")
    model.model.extra = nn.Parameter(torch.ones(3))
    with pytest.raises(InputError, match=r"model.extra is a parameter that LlamaForCausalLM has not"):
        export_model(model, tmp_path)
    with pytest.raises(InputError, match="no format 'gguf'; choose one of native, stock, onnx"):
        export_model(model, tmp_path, "gguf")  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.iterdir())
