"""Really trained weights: their gains matter, and finding, swapping and folding keep what the model does.

`glassllm` comes with the test extra `real`; stories260K is read from the folder that NORMSMITH_DATA names.
"""

from __future__ import annotations

import copy
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from normsmith.surgery import find_norms, fold_, restore_, swap_norms_
from normsmith.surgery.verify import difference, outputs

TEXT = (
    "One morning a boy and his sister walked down to the river. The water was high after the rain, and they could not "
    "see the stones on the other side. They sat on the grass, ate their bread and talked about the house where their "
    "grandmother had lived when she was young. Then the sun came out and they went home."
)
ATTENTION, MLP = "model.layers.{}.self_attn.{}_proj.weight", "model.layers.{}.mlp.{}_proj.weight"


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Rows from rotary pairs (0, 1), (2, 3), … to Llama's pairs (0, d/2), (1, d/2 + 1), … in every head."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def llama(config: LlamaConfig, state: dict[str, Tensor]) -> LlamaForCausalLM:
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for name in list(state):
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(name[-13:-12], 0)
        state[name] = half_split(state[name], heads) if heads else state[name]
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


def stories260k(path: Path) -> LlamaForCausalLM:
    """The file: seven int32 sizes, then all matrices of one sort after each other, layer by layer, in float32."""
    blob = path.read_bytes()
    width, hidden, layers, heads, kv_heads, vocabulary, context = struct.unpack_from("<7i", blob)
    values = torch.frombuffer(bytearray(blob), dtype=torch.float32, offset=28)
    kv = width // heads * kv_heads
    config = LlamaConfig(
        **{"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": context},
        **{"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    )
    layout: list[tuple[str, tuple[int, ...]]] = [
        ("model.layers.{}.input_layernorm.weight", (width,)),
        *(
            (ATTENTION.format("{}", name), (rows, width))
            for name, rows in zip("qkvo", (width, kv, kv, width), strict=True)
        ),
        ("model.layers.{}.post_attention_layernorm.weight", (width,)),
        (MLP.format("{}", "gate"), (hidden, width)),
        (MLP.format("{}", "down"), (width, hidden)),
        (MLP.format("{}", "up"), (hidden, width)),
    ]
    places = [("model.embed_tokens.weight", (vocabulary, width))]
    places += [(name.format(i), shape) for name, shape in layout for i in range(layers)]
    places += [("model.norm.weight", (width,))]
    state: dict[str, Tensor] = {}
    for name, shape in places:
        size = torch.Size(shape).numel()
        state[name], values = values[:size].reshape(shape).clone(), values[size:]
    assert len(values) == context * (width // heads), "the rotary tables are what is left"
    return llama(config, state)


def pieces(path: Path) -> list[bytes]:
    """The tokenizer's file: the longest length, then score, length and bytes of every piece."""
    blob, at, found = path.read_bytes(), 4, list[bytes]()
    while at < len(blob):
        _, size = struct.unpack_from("<fi", blob, at)
        piece = blob[at + 8 : at + 8 + size]
        found.append(bytes([int(piece[3:5], 16)]) if piece[:3] == b"<0x" else piece)
        at += 8 + size
    return found


def from_glassllm(theirs: Any) -> LlamaForCausalLM:
    sizes = theirs.cfg
    config = LlamaConfig(
        **{"vocab_size": sizes.vocab_size, "hidden_size": sizes.d_model, "num_hidden_layers": sizes.n_layers},
        **{"num_attention_heads": sizes.n_heads, "num_key_value_heads": sizes.n_kv_heads, "rms_norm_eps": sizes.eps},
        **{"intermediate_size": int(8 * sizes.d_model / 3), "max_position_embeddings": sizes.max_len},
        tie_word_embeddings=True,
    )
    value = {name: torch.tensor(p.data) for name, p in theirs.named_parameters().items()}
    state = {"model.embed_tokens.weight": value["E"], "model.norm.weight": value["norm_f.gamma"]}
    for i in range(sizes.n_layers):
        at = f"blocks.{i}."
        state[f"model.layers.{i}.input_layernorm.weight"] = value[at + "norm1.gamma"]
        state[f"model.layers.{i}.post_attention_layernorm.weight"] = value[at + "norm2.gamma"]
        state |= {ATTENTION.format(i, name.lower()): value[f"{at}attn.W_{name}"].T for name in "QKVO"}
        names = {"gate": "W1", "up": "W3", "down": "W2"}
        state |= {MLP.format(i, ours): value[f"{at}ffn.{name}"].T for ours, name in names.items()}
    return llama(config, state)


@torch.no_grad()
def loss(model: Any, ids: Tensor) -> float:
    return float(model(ids, labels=ids).loss)


def check(model: LlamaForCausalLM, ids: Tensor) -> tuple[float, float, float]:
    """Find, swap, restore and fold; the losses before, after folding, and with the gains dropped instead."""
    example = {"input_ids": ids}
    exact, before = outputs(copy.deepcopy(model).double(), example), outputs(model, example)
    sites = find_norms(model)
    assert [s.role for s in sites] == ["pre"] * (len(sites) - 1) + ["final"]
    assert len(sites) == 2 * model.config.num_hidden_layers + 1
    assert not any(s.blocked for s in sites)
    assert len(swap_norms_(model, "rmsnorm").swapped) == len(sites)
    assert difference(before, outputs(model, example)) == 0
    restore_(model)
    losses = [loss(model, ids)]
    dropped = copy.deepcopy(model)
    for site in sites:
        dropped.get_submodule(site.name).weight.data.fill_(1)
    assert len(fold_(model, "affine").absorbed) == len(sites)
    rounding = difference(exact, before)
    assert difference(exact, outputs(model, example)) <= max(2e-6, 2 * rounding)
    return losses[0], loss(model, ids), loss(dropped, ids)


def test_glassllm_keeps_its_loss_when_its_gains_are_folded() -> None:
    glassllm = pytest.importorskip("glassllm", reason="needs the test extra: pip install '.[real]'")
    theirs, tokenizer = glassllm.load_pretrained("en")
    ids = torch.tensor([tokenizer.encode(TEXT)])
    model = from_glassllm(theirs)
    assert model.num_parameters() == 852_608
    with glassllm.no_grad():
        expected = float(theirs.loss(ids[:, :-1].numpy(), ids[:, 1:].numpy()).data)
    before, folded, dropped = check(model, ids)
    assert before == pytest.approx(expected, abs=1e-4)
    assert folded == pytest.approx(before, abs=1e-5)
    assert dropped > before + 0.2


@pytest.mark.slow
def test_stories260k_tells_the_documented_story_after_folding() -> None:
    if "NORMSMITH_DATA" not in os.environ:
        pytest.skip("NORMSMITH_DATA does not name the folder with stories260K")
    folder = Path(os.environ["NORMSMITH_DATA"]) / "stories260K"
    model, words = stories260k(folder / "stories260K.bin"), pieces(folder / "tok512.bin")
    story = (folder / "expected_greedy.txt").read_text(encoding="utf-8")

    def tell() -> tuple[Tensor, str]:
        start = torch.tensor([[1]])
        ids = model.generate(start, max_new_tokens=256, do_sample=False, eos_token_id=None, pad_token_id=0)
        return ids, b"".join(words[i] for i in ids[0, 1:].tolist()).decode().strip()

    ids, told = tell()
    assert len(story) > 500
    assert told.startswith(story)
    before, folded, dropped = check(model, ids)
    assert before < 0.5, "it predicts its own greedy text well"
    assert folded == pytest.approx(before, abs=1e-5)
    assert dropped > before + 1
    assert torch.equal(tell()[0], ids)
