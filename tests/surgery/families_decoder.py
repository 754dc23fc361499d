"""The decoders among the families: tiny models, and what is right for each, written down by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as T
from torch import nn

from tests.surgery.family import ENTRY, GPT, GROUPED, ROPE, SIZES, STREAM, TOKENS, At, Family, hugging_face

_LATENT: dict[str, Any] = {  # DeepSeek: low-rank queries, keys and values; one dense layer, one of experts
    **SIZES,
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
}


def _llama_like(config: Any, **options: Any) -> Callable[[], nn.Module]:
    return hugging_face(lambda: config(**{**GROUPED, **options}))


def _llama_sites(mlp: str = "gate_proj up_proj", *more: At) -> tuple[At, ...]:
    return (
        At("model.layers.*.input_layernorm", 2, "pre", "q_proj k_proj v_proj"),
        At("model.layers.*.post_attention_layernorm", 2, "pre", mlp),
        At("model.norm", 1, "final", "lm_head"),
        *more,
    )


_HEADS = tuple(  # on the results of the projections, all of them or head by head
    At(f"model.layers.*.self_attn.{x}_norm", 2, "qk", blocked=ROPE, producer=f"{x}_proj") for x in "qk"
)
_QK = At("model.layers.*.self_attn.?_norm", 4, "qk", blocked=ROPE)
_PEER = "model.layers.*.self_attn.?_layernorm.norms.*"
_SANDWICH = (  # Gemma-2 and -3
    At("model.layers.*.input_layernorm", 2, "pre", "q_proj k_proj v_proj"),
    At("model.layers.*.post_attention_layernorm", 2, "sandwich", blocked=STREAM, producer="o_proj"),
    At("model.layers.*.pre_feedforward_layernorm", 2, "pre", "gate_proj up_proj"),
    At("model.layers.*.post_feedforward_layernorm", 2, "sandwich", blocked=STREAM, producer="down_proj"),
    At("model.norm", 1, "final", "lm_head"),
)
_MLA = tuple(
    At(f"model.layers.*.{name}", count, "pre", readers)
    for name, count, readers in (
        ("self_attn.q_a_layernorm", 2, "q_b_proj"),
        ("self_attn.kv_a_layernorm", 2, "kv_b_proj"),
        ("input_layernorm", 2, "q_a_proj kv_a_proj_with_mqa"),
    )
)
_DEEPSEEK = (
    *_MLA,
    At("model.layers.0.post_attention_layernorm", 1, "pre", "gate_proj up_proj"),
    At("model.layers.1.post_attention_layernorm", 1, "pre", "gate experts gate_proj up_proj"),
    At("model.norm", 1, "final", "lm_head"),
)

DECODERS: dict[str, Family] = {
    "gpt2": Family(
        "GPT-2",
        hugging_face(lambda: T.GPT2Config(**GPT)),
        "layernorm",
        (
            At("transformer.h.*.ln_1", 2, "pre", "c_attn"),
            At("transformer.h.*.ln_2", 2, "pre", "c_fc"),
            At("transformer.ln_f", 1, "final", "lm_head"),
        ),
        tied=True,
        new_biases="lm_head",
    ),
    "gpt_neox": Family(
        "GPT-NeoX",
        hugging_face(lambda: T.GPTNeoXConfig(**SIZES)),
        "layernorm",
        (
            At("gpt_neox.layers.*.input_layernorm", 2, "pre", "query_key_value"),
            At("gpt_neox.layers.*.post_attention_layernorm", 2, "pre", "dense_h_to_4h"),
            At("gpt_neox.final_layer_norm", 1, "final", "lm_head"),
        ),
        new_biases="lm_head",
    ),
    "opt": Family(
        "OPT",
        hugging_face(lambda: T.OPTConfig(**{**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32})),
        "layernorm",
        (
            At("model.decoder.layers.*.self_attn_layer_norm", 2, "pre", "q_proj k_proj v_proj"),
            At("model.decoder.layers.*.final_layer_norm", 2, "pre", "fc1"),
            At("model.decoder.final_layer_norm", 1, "final", "lm_head"),
        ),
        tied=True,
        new_biases="lm_head",
    ),
    "gptj": Family(
        "GPT-J",
        hugging_face(lambda: T.GPTJConfig(**GPT, rotary_dim=4)),
        "layernorm",
        (
            At("transformer.h.*.ln_1", 2, "pre", "q_proj k_proj v_proj fc_in"),
            At("transformer.ln_f", 1, "final", "lm_head"),
        ),
        new_biases="q_proj k_proj v_proj",
    ),
    "bloom": Family(
        "Bloom",
        hugging_face(lambda: T.BloomConfig(**TOKENS, vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
        "layernorm",
        (
            At("transformer.word_embeddings_layernorm", 1, "embedding", blocked=ENTRY),
            At("transformer.h.*.input_layernorm", 2, "pre", "query_key_value"),
            At("transformer.h.*.post_attention_layernorm", 2, "pre", "dense_h_to_4h"),
            At("transformer.ln_f", 1, "final", "lm_head"),
        ),
        tied=True,
        new_biases="lm_head",
    ),
    "falcon": Family(
        "Falcon (parallel, multi-query)",
        hugging_face(lambda: T.FalconConfig(**{k: v for k, v in SIZES.items() if k != "intermediate_size"})),
        "layernorm",
        (
            At("transformer.h.*.input_layernorm", 2, "pre", "query_key_value dense_h_to_4h"),
            At("transformer.ln_f", 1, "final", "lm_head"),
        ),
        tied=True,
        new_biases="query_key_value dense_h_to_4h lm_head",
    ),
    "phi": Family(
        "Phi",
        hugging_face(lambda: T.PhiConfig(**SIZES)),
        "layernorm",
        (
            At("model.layers.*.input_layernorm", 2, "pre", "q_proj k_proj v_proj fc1"),
            At("model.final_layernorm", 1, "final", "lm_head"),
        ),
    ),
    "llama": Family("Llama", _llama_like(T.LlamaConfig), "rmsnorm", _llama_sites()),
    "mistral": Family("Mistral", _llama_like(T.MistralConfig), "rmsnorm", _llama_sites()),
    "qwen2": Family("Qwen2", _llama_like(T.Qwen2Config), "rmsnorm", _llama_sites()),
    "qwen3": Family(
        "Qwen3", _llama_like(T.Qwen3Config, head_dim=8), "rmsnorm", _llama_sites("gate_proj up_proj", *_HEADS)
    ),
    "qwen3_moe": Family(
        "Qwen3-MoE",
        _llama_like(T.Qwen3MoeConfig, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
        "rmsnorm",
        _llama_sites("gate experts", *_HEADS),
    ),
    "mixtral": Family(
        "Mixtral", _llama_like(T.MixtralConfig, num_local_experts=4), "rmsnorm", _llama_sites("gate experts")
    ),
    "gemma": Family(
        "Gemma", _llama_like(T.GemmaConfig, head_dim=8), "rmsnorm", _llama_sites(), formula="(1 + w)·n", tied=True
    ),
    "gemma2": Family(
        "Gemma-2", _llama_like(T.Gemma2Config, head_dim=8), "rmsnorm", _SANDWICH, formula="(1 + w)·n", tied=True
    ),
    "gemma3": Family(
        "Gemma-3",
        _llama_like(T.Gemma3TextConfig, head_dim=8),
        "rmsnorm",
        (*_SANDWICH, _QK),
        formula="(1 + w)·n",
        tied=True,
    ),
    "olmo": Family("OLMo", _llama_like(T.OlmoConfig), "layernorm", _llama_sites(), formula="n"),
    "olmo2": Family(
        "OLMo-2",
        _llama_like(T.Olmo2Config),
        "rmsnorm",
        (
            *_HEADS,
            At("model.layers.*.post_attention_layernorm", 2, "sandwich", blocked=STREAM, producer="o_proj"),
            At("model.layers.*.post_feedforward_layernorm", 2, "sandwich", blocked=STREAM, producer="down_proj"),
            At("model.norm", 1, "final", "lm_head"),
        ),
    ),
    "stablelm": Family(
        "StableLM (with query and key norms)",
        _llama_like(T.StableLmConfig, qk_layernorm=True),
        "layernorm",
        _llama_sites("gate_proj up_proj", At(_PEER, 12, "qk", blocked="no linear layer reads it, but cat")),
        new_biases="q_proj k_proj v_proj gate_proj up_proj lm_head",
    ),
    "cohere": Family(
        "Cohere (with query and key norms)",
        _llama_like(T.CohereConfig, use_qk_norm=True),
        "layernorm",
        (
            At("model.layers.*.self_attn.?_norm", 4, "qk", blocked=ROPE, plain=False),  # one gain per head
            At("model.layers.*.input_layernorm", 2, "pre", "q_proj k_proj v_proj gate_proj up_proj"),
            At("model.norm", 1, "final", "lm_head"),
        ),
        tied=True,
    ),
    "deepseek_v2": Family("DeepSeek-V2", hugging_face(lambda: T.DeepseekV2Config(**_LATENT)), "rmsnorm", _DEEPSEEK),
    "deepseek_v3": Family("DeepSeek-V3", hugging_face(lambda: T.DeepseekV3Config(**_LATENT)), "rmsnorm", _DEEPSEEK),
}
