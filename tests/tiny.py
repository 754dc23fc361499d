"""Tiny random models of many families, with every norm parameter and bias far from its initial value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LM = {
    "vocab_size": 60,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **_SIZES,
}
_LLAMA = {**_LM, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
_GPT2 = {"vocab_size": 60, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
_VIT = {**_SIZES, "intermediate_size": 48, "image_size": 16, "patch_size": 8, "num_channels": 3}

# name → (model class, options of its configuration)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_LM, "intermediate_size": 48}),
    "opt": ("OPTForCausalLM", {**_LM, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": ("BloomForCausalLM", {"vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "gemma": ("GemmaForCausalLM", _LLAMA),
    "gemma2": ("Gemma2ForCausalLM", {**_LLAMA, "query_pre_attn_scalar": 8, "sliding_window": 16}),
    "qwen3": ("Qwen3ForCausalLM", _LLAMA),
    "olmo2": ("Olmo2ForCausalLM", _LLAMA),
    "bert": ("BertForMaskedLM", {**_LM, "intermediate_size": 48}),
    "vit": ("ViTModel", _VIT),
}


# One for each way in which norms are placed and written, where every family with every norm would take too long.
VARIED = ("gpt2", "gemma2", "qwen3", "bert")


def tiny(family: str, **changes: Any) -> Any:
    """A model of the family in evaluation mode; `changes` go into its configuration."""
    name, options = FAMILIES[family]
    cls: Any = getattr(transformers, name)
    config = cls.config_class(**{**options, **changes})
    config._attn_implementation = "eager"
    return scramble_all(cls(config).eval())


def is_norm(module: nn.Module) -> bool:
    """By the name of its class: the models here have no other modules that are called so."""
    return "Norm" in type(module).__name__


def scramble_all(model: Any, seed: int = 3) -> Any:
    """Random gains, shifts and biases, and weights large enough that every sublayer matters."""
    generator = torch.Generator().manual_seed(seed)
    norms = {id(p) for m in model.modules() if is_norm(m) for p in m.parameters(recurse=False)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in norms:
                parameter.add_(0.4 * noise)
            else:
                parameter.copy_((0.3 if parameter.ndim == 1 else 0.15) * noise)
    return model


def example(model: Any, rows: int = 2) -> dict[str, Tensor]:
    """An input for the model."""
    generator = torch.Generator().manual_seed(4)
    if hasattr(model.config, "image_size"):
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    return {"input_ids": torch.randint(3, 60, (rows, 12), generator=generator)}


@torch.no_grad()
def output(model: Any) -> Tensor:
    """Its logits, or its last hidden states, on `example`."""
    return model(**{k: v.to(model.dtype) if v.is_floating_point() else v for k, v in example(model).items()})[0]


def apart(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference divided by the largest value."""
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Beside other busy processes most of all."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def wide_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let norms that say `x.float()` keep float64, so that float64 models are exact."""
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_state(model: nn.Module, before: dict[str, Tensor]) -> bool:
    """Whether every tensor has the bits it had."""
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)
