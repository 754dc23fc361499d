"""Small checkpoints of several families on disk, and what is read back from them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.tiny import scramble_all

IDS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(2))
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LM = {"vocab_size": 90, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **SIZES}
LLAMA = {**_LM, "intermediate_size": 48, "num_key_value_heads": 2}
_GPT2 = {"vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
_SANDWICH = [f"model.layers.{i}.post_{part}_layernorm" for i in (0, 1) for part in ("attention", "feedforward")]
INDEX = "model.safetensors.index.json"

# family → (model class, options of its configuration, sites that stay with all their gain and shift)
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("LlamaForCausalLM", LLAMA, []),
    "tied llama": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, []),
    "qwen2": ("Qwen2ForCausalLM", LLAMA, []),
    "gemma2": ("Gemma2ForCausalLM", {**LLAMA, "head_dim": 8}, _SANDWICH),
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "num_local_experts": 4}, []),
    "gpt2": ("GPT2LMHeadModel", {**_GPT2, "eos_token_id": 2}, ["transformer.ln_f"]),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_LM, "intermediate_size": 48}, ["gpt_neox.final_layer_norm"]),
    "opt": (
        "OPTForCausalLM",
        {**_LM, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
        ["model.decoder.final_layer_norm"],
    ),
}


def make(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    name, options, _ = FAMILIES[family]
    cls: Any = getattr(transformers, name)
    return scramble_all(cls(cls.config_class(**{**options, **changes})).eval()).to(dtype)


def stored(folder: Path, model: Any, shard: str = "20KB") -> Path:
    """The model in a folder, with a tokenizer's file and a subfolder beside it."""
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "figures").mkdir()
    (folder / "figures/loss.txt").write_text("3.2")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def raw(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every stored tensor: dtype, shape and bytes, read by the format's definition."""
    found: dict[str, tuple[str, list[int], bytes]] = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, info in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                start, stop = info["data_offsets"]
                found[name] = (info["dtype"], info["shape"], data[begin + start : begin + stop])
    return found


def load(folder: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
def exact(model: Any) -> Tensor:
    """The logits in float64."""
    twin = copy.deepcopy(model).double()
    if hasattr(twin.config, "_experts_implementation"):
        twin.set_experts_implementation("eager")
    return twin(IDS).logits


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
