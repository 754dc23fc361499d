"""Encoders, encoder-decoders, plain PyTorch and the project's own models: tiny ones, and what is right for each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as T
from torch import Tensor, nn

from normsmith.models import NormsmithForCausalLM, preset_config
from tests.surgery.family import ENTRY, NORM, RETURNED, SIZES, STREAM, TOKENS, VISION, At, Family, hugging_face


class _RMSNormCode(nn.Module):
    """Code of one's own with torch's RMSNorm, one with the default eps and one with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(32), nn.RMSNorm(32, eps=1e-3)])
        self.up = nn.ModuleList([nn.Linear(32, 48, bias=False) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(48, 32) for _ in range(2)])
        self.final, self.head = nn.RMSNorm(32), nn.Linear(32, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, 32) → (…, 10)."""
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(torch.relu(up(norm(x))))
        return self.head(self.final(x))


class _AfterCode(nn.Module):
    """LayerNorms on results of linear layers with and without bias, all features together or head by head.

    The last one is multiplied by a number before it is read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(32, 32, bias=bias) for bias in (True, False)])
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.LayerNorm(32)])
        self.heads = nn.ModuleList([nn.Linear(32, 32, bias=bias) for bias in (True, False)])
        self.head_norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.final, self.out = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(…, 32) → (…, 10)."""
        for linear, norm, heads, head_norm in zip(self.linears, self.norms, self.heads, self.head_norms, strict=True):
            x = x + norm(linear(x))
            x = x + torch.tanh(head_norm(heads(x).unflatten(-1, (4, 8)))).flatten(-2)
        return self.out(self.final(x) / 4)


def _encoder(norm_first: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(32, 4, 48, norm_first=norm_first, batch_first=True)
        return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32), enable_nested_tensor=False)

    return build


def _decoder(norm_first: bool) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerDecoder(
        nn.TransformerDecoderLayer(32, 4, 48, norm_first=norm_first, batch_first=True), 2, norm=nn.LayerNorm(32)
    )


def _own(preset: str, connection: str) -> Callable[[], nn.Module]:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return lambda: NormsmithForCausalLM(preset_config(preset, connection=connection, **sizes))


def _features(*lengths: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda generator: tuple(torch.randn(2, n, 32, generator=generator) for n in lengths)


_OWN_ATTENTION, _OWN_MLP = "model.layers.*.attention_connection.norm", "model.layers.*.mlp_connection.norm"
OTHERS: dict[str, Family] = {
    "t5": Family(
        "T5",
        hugging_face(
            lambda: T.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
            "AutoModelForSeq2SeqLM",
        ),
        "rmsnorm",
        (
            At("encoder.block.*.layer.0.layer_norm", 2, "pre", "q k v"),
            At("encoder.block.*.layer.1.layer_norm", 2, "pre", "wi"),
            At("encoder.final_layer_norm", 1, "final", "k v", blocked=RETURNED),
            At("decoder.block.*.layer.0.layer_norm", 2, "pre", "q k v"),
            At("decoder.block.*.layer.1.layer_norm", 2, "pre", "q"),
            At("decoder.block.*.layer.2.layer_norm", 2, "pre", "wi"),
            At("decoder.final_layer_norm", 1, "final", "lm_head"),
        ),
        tied=True,
    ),
    "modernbert": Family(
        "ModernBERT (masked LM)",
        hugging_face(
            lambda: T.ModernBertConfig(**SIZES, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2),
            "AutoModelForMaskedLM",
        ),
        "layernorm",
        (
            At("model.embeddings.norm", 1, "embedding", "Wqkv", blocked=STREAM),  # layer 0 has no attn_norm
            At("model.layers.1.attn_norm", 1, "pre", "Wqkv"),
            At("model.layers.*.mlp_norm", 2, "pre", "Wi"),
            At("model.final_norm", 1, "pre", "dense"),  # the prediction head is an MLP with a norm of its own
            At("head.norm", 1, "final", "decoder"),
        ),
        tied=True,
    ),
    "bert": Family(
        "BERT",
        hugging_face(lambda: T.BertConfig(**SIZES), "AutoModel"),
        "layernorm",
        (
            At("embeddings.LayerNorm", 1, "embedding", "query key value", blocked=STREAM),
            At("encoder.layer.*.attention.output.LayerNorm", 2, "post", "dense", blocked=STREAM),
            At("encoder.layer.0.output.LayerNorm", 1, "post", "query key value", blocked=STREAM),
            At("encoder.layer.1.output.LayerNorm", 1, "final", "dense", blocked=RETURNED),
        ),
    ),
    "vit": Family(
        "ViT (classifier)",
        hugging_face(lambda: T.ViTConfig(**VISION, intermediate_size=48), "AutoModelForImageClassification"),
        "layernorm",
        (
            At("vit.layers.*.layernorm_before", 2, "pre", "q_proj k_proj v_proj"),
            At("vit.layers.*.layernorm_after", 2, "pre", "fc1"),
            At("vit.layernorm", 1, "final", "classifier"),
        ),
    ),
    "dinov2": Family(
        "DINOv2",
        hugging_face(lambda: T.Dinov2Config(**VISION), "AutoModel"),
        "layernorm",
        (
            At("encoder.layer.*.norm1", 2, "pre", "q_proj k_proj v_proj"),
            At("encoder.layer.*.norm2", 2, "pre", "fc1"),
            At("layernorm", 1, "final", blocked=RETURNED),
        ),
    ),
    "clip": Family(
        "CLIP",
        hugging_face(
            lambda: T.CLIPConfig(
                text_config={**SIZES, "eos_token_id": 63},
                vision_config={**VISION, "intermediate_size": 48},
                projection_dim=16,
            ),
            "AutoModel",
        ),
        "layernorm",
        (
            At("*_model.encoder.layers.*.layer_norm1", 4, "pre", "q_proj k_proj v_proj"),
            At("*_model.encoder.layers.*.layer_norm2", 4, "pre", "fc1"),
            At("text_model.final_layer_norm", 1, "final", "text_projection", blocked=RETURNED),
            At("vision_model.pre_layrnorm", 1, "embedding", blocked=ENTRY),
            At("vision_model.post_layernorm", 1, "final", "visual_projection"),
        ),
        new_biases="visual_projection",
    ),
    "whisper": Family(
        "Whisper",
        hugging_face(
            lambda: T.WhisperConfig(
                **TOKENS,
                **{"vocab_size": 64, "d_model": 32, "num_mel_bins": 8, "decoder_start_token_id": 1},
                **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
                **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
                **{"max_source_positions": 12, "max_target_positions": 64},
            ),
            "AutoModelForSpeechSeq2Seq",
        ),
        "layernorm",
        (
            At("model.*coder.layers.*.self_attn_layer_norm", 4, "pre", "q_proj k_proj v_proj"),
            At("model.*coder.layers.*.final_layer_norm", 4, "pre", "fc1"),
            At("model.encoder.layer_norm", 1, "final", "k_proj v_proj", blocked=RETURNED),
            At("model.decoder.layers.*.encoder_attn_layer_norm", 2, "pre", "q_proj"),
            At("model.decoder.layer_norm", 1, "final", "proj_out"),
        ),
        tied=True,
        new_biases="k_proj proj_out",
    ),
    "torch_encoder_pre": Family(
        "nn.TransformerEncoder, norm_first",
        _encoder(True),
        "layernorm",
        (
            At("layers.*.norm1", 2, "pre", "self_attn"),
            At("layers.*.norm2", 2, "pre", "linear1"),
            At("norm", 1, "final", blocked=RETURNED),
        ),
        example=_features(6),
    ),
    "torch_encoder_post": Family(
        "nn.TransformerEncoder, post-norm",
        _encoder(False),
        "layernorm",
        (
            At("layers.*.norm1", 2, "post", "linear1", blocked=STREAM),
            At("layers.0.norm2", 1, "post", "self_attn", blocked=STREAM),
            At("layers.1.norm2", 1, "post", blocked=NORM),
            At("norm", 1, "final", blocked=RETURNED),
        ),
        example=_features(6),
    ),
    "torch_decoder_pre": Family(
        "nn.TransformerDecoder, norm_first",
        _decoder(True),
        "layernorm",
        (
            At("layers.*.norm1", 2, "pre", "self_attn"),
            At("layers.*.norm2", 2, "pre", "multihead_attn"),  # the queries only; keys and values read the memory
            At("layers.*.norm3", 2, "pre", "linear1"),
            At("norm", 1, "final", blocked=RETURNED),
        ),
        example=_features(5, 7),
    ),
    "torch_decoder_post": Family(
        "nn.TransformerDecoder, post-norm",
        _decoder(False),
        "layernorm",
        (
            At("layers.*.norm1", 2, "post", "multihead_attn", blocked=STREAM),
            At("layers.*.norm2", 2, "post", "linear1", blocked=STREAM),
            At("layers.0.norm3", 1, "post", "self_attn", blocked=STREAM),
            At("layers.1.norm3", 1, "post", blocked=NORM),
            At("norm", 1, "final", blocked=RETURNED),
        ),
        example=_features(5, 7),
    ),
    "torch_rmsnorm": Family(
        "own code with nn.RMSNorm",
        _RMSNormCode,
        "rmsnorm",
        (At("norms.0", 1, "pre", "0"), At("norms.1", 1, "pre", "1"), At("final", 1, "final", "head")),
        example=_features(6),
    ),
    "torch_after": Family(
        "own code with nn.LayerNorm after linear layers",
        _AfterCode,
        "layernorm",
        (
            *(At(f"norms.{i}", 1, "sandwich", blocked=STREAM, producer=f"{i}") for i in (0, 1)),
            At("final", 1, "final", "out"),
            *(
                At(f"head_norms.{i}", 1, "qk", blocked="no linear layer reads it, but tanh", producer=f"{i}")
                for i in (0, 1)
            ),
        ),
        example=_features(6),
    ),
    "own_llama": Family(
        "normsmith, preset llama",
        _own("llama", "pre"),
        "rmsnorm",
        (
            At(_OWN_ATTENTION, 2, "pre", "q_proj k_proj v_proj"),
            At(_OWN_MLP, 2, "pre", "gate_proj up_proj"),
            At("model.norm", 1, "final", "lm_head"),
        ),
        tied=True,
    ),
    "own_gpt": Family(
        "normsmith, preset gpt",
        _own("gpt", "pre"),
        "layernorm",
        (
            At(_OWN_ATTENTION, 2, "pre", "q_proj k_proj v_proj"),
            At(_OWN_MLP, 2, "pre", "up_proj"),
            At("model.norm", 1, "final", "lm_head"),
        ),
        tied=True,
        new_biases="lm_head",
        reloads=True,
    ),
    "own_post": Family(
        "normsmith, post-norm",
        _own("llama", "post"),
        "rmsnorm",
        (
            At(_OWN_ATTENTION, 2, "post", "gate_proj up_proj", blocked=STREAM),
            At("model.layers.0.mlp_connection.norm", 1, "post", "q_proj k_proj v_proj", blocked=STREAM),
            At("model.layers.1.mlp_connection.norm", 1, "final", "lm_head"),
        ),
        tied=True,
    ),
    "own_sphere": Family(
        "normsmith, sphere",
        _own("llama", "sphere"),
        "rmsnorm",
        (At("model.norm", 1, "final", "lm_head"),),
        tied=True,
    ),
}
