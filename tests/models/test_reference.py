"""The reference transformer against transformers' own Llama and GPT-2, and as a Hugging Face citizen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from normsmith.connections import connections
from normsmith.errors import ConfigError, InputError, NormsmithError
from normsmith.models import NormsmithConfig, NormsmithForCausalLM, preset_config
from normsmith.norms import create_norm, norms
from tests.conftest import scramble

VOCAB, D, LAYERS, HEADS = 130, 48, 3, 4
IDS = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))


def small(preset: str = "llama", **changes: Any) -> NormsmithForCausalLM:
    sizes = {"vocab_size": VOCAB, "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    model = NormsmithForCausalLM(preset_config(preset, **{**sizes, "initializer_range": 0.1, **changes}))
    scramble(model)
    return model.eval()


def from_llama(source: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "input_layernorm.weight": "attention_connection.norm.gamma",
        "post_attention_layernorm.weight": "mlp_connection.norm.gamma",
        "model.norm.weight": "model.norm.gamma",
    }
    renamed = {}
    for name, tensor in source.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def from_gpt2(source: dict[str, Tensor]) -> dict[str, Tensor]:
    plain = {
        "ln_1": "attention_connection.norm",
        "ln_2": "mlp_connection.norm",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    }
    tops = {"wte.weight": "embed_tokens.weight", "wpe.weight": "embed_positions.weight"}
    tops |= {"ln_f.weight": "norm.gamma", "ln_f.bias": "norm.beta"}
    result = {}
    for name, tensor in source.items():
        name = name.removeprefix("transformer.")
        if name in tops or name == "lm_head.weight":
            result[f"model.{tops[name]}" if name in tops else name] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        part, kind = rest.rsplit(".", 1)
        value = tensor.T if tensor.ndim == 2 else tensor  # Conv1D stores (in, out)
        if part == "attn.c_attn":
            for letter, piece in zip("qkv", value.chunk(3), strict=True):
                result[f"model.layers.{layer}.self_attn.{letter}_proj.{kind}"] = piece
            continue
        if part.startswith("ln_"):
            kind = {"weight": "gamma", "bias": "beta"}[kind]
        result[f"model.layers.{layer}.{plain[part]}.{kind}"] = value
    return result


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_equals_transformers_llama(kv_heads: int, implementation: str) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=D, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=8 * D // 3, num_key_value_heads=kv_heads, tie_word_embeddings=True,
        initializer_range=0.1, rms_norm_eps=1e-6, attn_implementation=implementation,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    ours = small(num_key_value_heads=kv_heads, attn_implementation=implementation)
    ours.load_state_dict(from_llama(theirs.state_dict()))
    assert ours.config._attn_implementation == implementation
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=1e-5, atol=1e-5)
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    padded = [m(IDS, attention_mask=mask, labels=IDS) for m in (ours, theirs)]
    torch.testing.assert_close(padded[0].logits[:, 5:], padded[1].logits[:, 5:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded[0].loss, padded[1].loss, rtol=1e-5, atol=1e-5)


def test_equals_transformers_gpt2() -> None:
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=D, n_layer=LAYERS, n_head=HEADS, n_positions=64, initializer_range=0.1,
        attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    ours = small("gpt", max_position_embeddings=64)
    ours.load_state_dict(from_gpt2(theirs.state_dict()))
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("connection", [*connections, *connections.aliases])
@pytest.mark.parametrize("preset", ["llama", "gpt"])
def test_cache_generation_and_reload(preset: str, connection: str, tmp_path: Path) -> None:
    model = small(preset, connection=connection)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with_cache = model.generate(IDS, use_cache=True, **options)
    assert torch.equal(model.generate(IDS, use_cache=False, **options), with_cache)
    assert torch.equal(model.generate(IDS, cache_implementation="static", disable_compile=True, **options), with_cache)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, NormsmithForCausalLM)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("norm", list(norms))
def test_every_norm_trains_a_step(norm: str) -> None:
    model = small(norm=norm).train()
    model(IDS, labels=IDS).loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert missing == []
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_later_tokens_do_not_reach_earlier_ones() -> None:
    model = small(connection="sphere")
    changed = IDS.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % VOCAB
    assert torch.equal(model(changed).logits[:, :9], model(IDS).logits[:, :9])


def test_activation_checkpointing_and_hidden_states() -> None:
    model = small(connection="sphere").train()
    plain = model(IDS, labels=IDS, output_hidden_states=True)
    assert len(plain.hidden_states) == LAYERS + 1
    wanted = torch.autograd.grad(plain.loss, list(model.parameters()))
    model.activation_checkpointing_enable()
    got = torch.autograd.grad(model(IDS, labels=IDS).loss, list(model.parameters()))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("norm", ["tapered_rmsnorm", "fakeln_rms", "autonorm"])
@pytest.mark.parametrize("connection", ["pre", "sphere"])
def test_bfloat16_reload_keeps_schedule_state_and_stream(connection: str, norm: str, tmp_path: Path) -> None:
    model = small(norm=norm, connection=connection)
    for name, buffer in model.named_buffers():
        if name.endswith((".scale", ".sigma", ".static_weights")):
            buffer.fill_(1.2345678)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again(IDS).logits.dtype == torch.bfloat16
    for name, buffer in model.named_buffers():
        assert torch.equal(dict(again.named_buffers())[name], buffer), name


def test_angles_of_a_cast_model_are_those_of_a_loaded_one(tmp_path: Path) -> None:
    model = small()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(model.bfloat16()(IDS).logits, loaded(IDS).logits)
    assert {b.dtype for name, b in model.named_buffers() if "inverse_frequency" in name} == {torch.float32}


def test_token_ids_of_other_names_are_kept(tmp_path: Path) -> None:
    config = NormsmithConfig(cls_token_id=1, sep_token_id=2, mask_token_id=3)  # pyright: ignore
    config.save_pretrained(tmp_path)
    again: Any = NormsmithConfig.from_pretrained(tmp_path)
    assert (again.cls_token_id, again.sep_token_id, again.mask_token_id) == (1, 2, 3)


def test_missing_weights_start_at_their_initial_values(tmp_path: Path) -> None:
    model = small(norm="tapered_rmsnorm", connection="pre")
    state = {k: v for k, v in model.state_dict().items() if "mlp_connection" not in k and k != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in again.state_dict().items():
        if "mlp_connection" in name:
            start = 1.0 if name.rpartition(".")[2] in {"gamma", "gamma_tilde", "gate", "gate_eval", "scale"} else 0.0
            assert (tensor == start).all(), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "rmsnrom"}, "unknown norm 'rmsnrom'; did you mean 'rmsnorm'"),
        ({"connection": "sfere"}, "unknown connection 'sfere'; did you mean 'sphere'"),
        ({"connection": {"kind": "sphere", "q": 2}}, "unknown key 'q'"),
        ({"connection": {"kind": "sphere", "p": 0}}, "p = 0"),
        ({"hidden_size": 50}, "hidden_size=50 is not divisible by num_attention_heads=4; write 48 or 52"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"hiden_size": 64}, "unknown key 'hiden_size' in the model configuration; did you mean 'hidden_size'"),
        ({"mlp": "swigl"}, "unknown mlp 'swigl' in the model configuration; did you mean 'swiglu'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
    ],
)
def test_bad_configuration_is_one_clear_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NormsmithError, match=".") as caught:
        small(**changes)
    assert isinstance(caught.value, InputError | ConfigError)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_preset_and_too_long_sequence() -> None:
    with pytest.raises(InputError, match="unknown preset 'lama'; did you mean 'llama'"):
        preset_config("lama")
    with pytest.raises(InputError, match="learned positions for 8 only"):
        small("gpt", max_position_embeddings=8)(IDS)


def test_configuration_is_plain_json(tmp_path: Path) -> None:
    config = preset_config("gpt", connection="geo", norm={"kind": "layernorm", "eps": 1e-6})
    config.save_pretrained(tmp_path)
    again = NormsmithConfig.from_pretrained(tmp_path)
    assert (again.connection_spec, again.norm_spec) == (config.connection_spec, config.norm_spec)


def test_a_model_with_different_norms_at_different_sites_reloads_as_it_is(tmp_path: Path) -> None:
    model = small("gpt", use_bias=False)
    model.model.layers[1].mlp_connection.norm = scramble(create_norm("dyt", D))
    model.model.layers[2].attention_connection.norm = None
    model.model.layers[0].self_attn.q_proj.bias = torch.nn.Parameter(torch.randn(D))
    logits = model(IDS).logits
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, logits)
    assert sorted(again.config.norm_overrides) == [
        "layers.1.mlp_connection.norm",
        "layers.2.attention_connection.norm",
    ]
    assert again.config.norm["kind"] == "layernorm"


# transformers 5.24 passes create_block_mask a flag that torch 2.13 deprecates, and compiling it warns on the way.
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("implementation", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)])
@torch.no_grad()
def test_attention_implementations_agree(implementation: str) -> None:
    model = small(num_key_value_heads=2)
    wanted = model(IDS).logits
    model.set_attn_implementation(implementation)
    torch.testing.assert_close(model(IDS).logits, wanted, rtol=1e-4, atol=1e-5)


def test_the_old_name_of_the_cache_is_understood() -> None:
    model = small()
    cache = DynamicCache(config=model.config)
    with pytest.warns(FutureWarning, match="past_key_values"):
        model(IDS[:, :8], past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 8
    torch.testing.assert_close(model(IDS[:, 8:], cache=cache).logits, model(IDS).logits[:, 8:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", ["num_layers", "d_model", "max_seq_len", "attention_dropout", "norm_eps"])
def test_a_preset_takes_no_unknown_key(key: str) -> None:
    with pytest.raises(InputError, match=f"unknown key '{key}' in the model configuration"):
        preset_config("llama", **{key: 2})
