"""Configuration of the reference transformer, and its presets."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from normsmith.config import Config
from normsmith.connections import ConnectionConfig, connection_config, connections
from normsmith.errors import InputError, UnknownNameError
from normsmith.norms import NormConfig, norm_config
from normsmith.norms.padding import refuse_pooling

PRESETS: dict[str, dict[str, Any]] = {
    "llama": {
        "norm": {"kind": "rmsnorm"},
        "positions": "rope",
        "mlp": "swiglu",
        "use_bias": False,
        "scale_residual_init": False,
    },
    "gpt": {
        "norm": {"kind": "layernorm"},
        "positions": "learned",
        "mlp": "gelu",
        "use_bias": True,
        "scale_residual_init": True,
    },
    "nanogpt": {
        "norm": {"kind": "layernorm", "bias": False},
        "positions": "learned",
        "mlp": "gelu",
        "use_bias": False,
        "scale_residual_init": True,
    },
}


@strict
class NormsmithConfig(PreTrainedConfig):
    """Configuration of `NormsmithForCausalLM`.

    Args:
        vocab_size: number of tokens.
        hidden_size: width d of the residual stream.
        num_hidden_layers: blocks; the stream has twice as many sublayers.
        num_attention_heads: query heads; they divide `hidden_size`.
        num_key_value_heads: key and value heads (grouped-query attention); default: as many as query heads.
        intermediate_size: width of the MLP; default 4·d for `gelu`, 8·d/3 rounded down for `swiglu`.
        max_position_embeddings: longest sequence; a hard limit only for learned positions.
        norm: the norm of the connections, as a registry name or a mapping with `kind`.
        connection: how sublayers join the stream, as a registry name, alias or a mapping with `kind`.
        final_norm: the norm before the head; default: what the connection's family asks for.
        norm_overrides: site name → norm, for sites that differ (a partly folded model).
        positions: `rope`, `learned` or `none`.
        mlp: `swiglu` or `gelu` (the tanh form, as in GPT-2).
        use_bias: whether linear layers have a bias.
        input_bias: the same for the layers that read a norm (q, k, v, gate, up); default `use_bias`. Folding sets it.
        head_bias: whether the output head has a bias. Folding a final norm with a shift sets it.
        scale_residual_init: initialise the output projections with a deviation smaller by √(2·blocks), as GPT-2 does.
        initializer_range: standard deviation of the initial weights.
        rope_theta: base of the rotary frequencies.
        tie_word_embeddings: whether the head is the embedding matrix; default yes, except for `ngpt`, which forbids it.
        embedding_scale: whether one learned scalar, √d at the start, multiplies the embeddings; default: in language
            models with `dyt` or `derf` norms, or with a mixture of nothing else, which do not train well without it
            (arXiv 2503.10622).
        causal: whether a token sees only what is before it; models for classification and regression see everything.
        dropout: probability of zeroing an entry of the embeddings or of a sublayer's output, in training.
        drop_path: probability of leaving out a whole sublayer for one sample, in training (stochastic depth, arXiv
            1603.09382); it rises linearly from 0 in the first block to this in the last.
        layer_scale: initial value of a learned gain per channel on every sublayer's output (arXiv 2103.17239).
        pooling: what a classifier of sequences or images reads: the `mean` of the valid tokens, or the first (`cls`).
    """

    model_type: ClassVar[str] = "normsmith"
    reads_tokens: ClassVar[bool] = True  # whether the trunk embeds token ids; images and tables have other embeddings

    vocab_size: int = 4096
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 1024
    norm: str | dict[str, Any] = "rmsnorm"
    connection: str | dict[str, Any] = "pre"
    final_norm: str | dict[str, Any] | None = None
    norm_overrides: dict[str, Any] | None = None
    positions: str = "rope"
    mlp: str = "swiglu"
    use_bias: bool = False
    input_bias: bool | None = None
    head_bias: bool = False
    scale_residual_init: bool = False
    initializer_range: float = 0.02
    rope_theta: float = 10000.0
    embedding_scale: bool | None = None
    causal: bool = True
    dropout: float = 0.0
    drop_path: float = 0.0
    layer_scale: float | None = None
    pooling: str = "mean"
    use_cache: bool = True
    tie_word_embeddings: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        _reject_typos(kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size if self.mlp == "gelu" else 8 * self.hidden_size // 3
        if self.input_bias is None:
            self.input_bias = self.use_bias
        norm = norm_config(self.norm)
        connection = connection_config(self.connection)
        family = connections.get(connection.kind)
        if self.final_norm is None:
            self.final_norm = family.final_norm(norm, connection).to_dict()
        if self.embedding_scale is None:
            self.embedding_scale = self.causal and type(self).reads_tokens and _is_elementwise(norm)
        if self.tie_word_embeddings is None:
            self.tie_word_embeddings = not family.unit_weights
        self.norm, self.connection = norm.to_dict(), connection.to_dict()
        self.final_norm = norm_config(self.final_norm).to_dict()
        self._check()
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers. What was written before `embedding_scale` existed has no such scale."""
        return super().from_dict({"embedding_scale": False, **config_dict}, **kwargs)

    def _check(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        for spec in (self.norm, self.final_norm or self.norm, *(self.norm_overrides or {}).values()):
            if self.causal:
                refuse_pooling(norm_config(spec), "the model")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or 1
        if self.hidden_size % heads:
            near = [d for d in (self.hidden_size // heads * heads, -(-self.hidden_size // heads) * heads) if d]
            raise InputError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={heads}; "
                f"write {' or '.join(str(d) for d in near)}"
            )
        if heads % kv_heads:
            raise InputError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
        if self.positions == "rope" and self.hidden_size // heads % 2:
            raise InputError(f"rotary positions need an even head width, got {self.hidden_size // heads}")
        for name, value, known in (
            ("positions", self.positions, ("rope", "learned", "none")),
            ("mlp", self.mlp, ("swiglu", "gelu")),
            ("pooling", self.pooling, ("mean", "cls")),
        ):
            if value not in known:
                raise UnknownNameError(name, value, known, "the model configuration")
        if self.tie_word_embeddings and connections.get(self.connection_spec.kind).unit_weights:
            raise InputError(
                f"connection {self.connection_spec.kind!r} has no tied head; write tie_word_embeddings=False or leave "
                "it out"
            )
        for name, rate in (("dropout", self.dropout), ("drop_path", self.drop_path)):
            if not 0 <= rate < 1:
                raise InputError(f"{name}={rate} is no probability below 1")

    @property
    def norm_spec(self) -> NormConfig:
        """`norm` as a configuration object."""
        return norm_config(self.norm)

    @property
    def connection_spec(self) -> ConnectionConfig:
        """`connection` as a configuration object."""
        return connection_config(self.connection)


# Keys of transformers that are spelt nearly like ours, as a tokenizer for classification has them.
_OTHERS = {"sep_token_id", "cls_token_id", "mask_token_id", "decoder_start_token_id"}


def _is_elementwise(norm: NormConfig) -> bool:
    """Whether a norm saturates, and neither it nor any candidate of a mixture divides by the scale of what it reads."""
    kinds = _kinds(norm)
    return bool(kinds & {"dyt", "derf"}) and kinds <= {"dyt", "derf", "identity"}


def _kinds(norm: NormConfig) -> set[str]:
    candidates: tuple[NormConfig, ...] = getattr(norm, "candidates", ())
    return {kind for candidate in candidates for kind in _kinds(candidate)} if candidates else {norm.kind}


def _reject_typos(unknown: dict[str, Any]) -> None:
    # transformers keeps unknown keys as attributes; one that nearly is a key of ours is a typing error.
    for key in unknown.keys() - _OTHERS:
        close = difflib.get_close_matches(key, NormsmithConfig.__annotations__, n=1, cutoff=0.8)
        if close and close != [key]:
            raise UnknownNameError("key", key, close, "the model configuration")


class ModelConfig(Config):
    """The `model` part of a recipe: a preset and what differs from it."""

    preset: Annotated[str, pydantic.AfterValidator(lambda name: known_preset(name))] = "llama"
    hidden_size: int = pydantic.Field(default=128, ge=1)
    num_hidden_layers: int = pydantic.Field(default=4, ge=1)
    num_attention_heads: int = pydantic.Field(default=4, ge=1)
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    tie_word_embeddings: bool | None = None
    initializer_range: float = pydantic.Field(default=0.02, gt=0)
    embedding_scale: bool | None = None
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    drop_path: float = pydantic.Field(default=0.0, ge=0, lt=1)
    layer_scale: float | None = pydantic.Field(default=None, gt=0)
    pooling: Literal["mean", "cls"] = "mean"
    patch_size: int = pydantic.Field(default=4, ge=1)

    def build(
        self, vocab_size: int, max_positions: int, kind: type[NormsmithConfig] | None = None, **changes: Any
    ) -> NormsmithConfig:
        """The model's configuration for a vocabulary and a longest sequence; `changes` override the preset.

        With `kind`, a subclass of `NormsmithConfig`, one of that class; options that it does not have are left out.
        """
        kind = kind or NormsmithConfig
        known = {field.name for field in dataclasses.fields(kind)}
        sizes = {key: value for key, value in self.model_dump(exclude={"preset"}).items() if key in known}
        lengths = {"vocab_size": vocab_size, "max_position_embeddings": max_positions}
        options: dict[str, Any] = {**PRESETS[self.preset], **sizes, **lengths, **changes}
        return kind(**options)


def preset_config(preset: str, **changes: Any) -> NormsmithConfig:
    """The configuration called `preset` (`llama`, `gpt` or `nanogpt`) with `changes`.

    >>> preset_config("llama", hidden_size=64, connection="sphere").connection["kind"]
    'sphere'
    """
    fields = [*(field.name for field in dataclasses.fields(NormsmithConfig)), "attn_implementation"]
    for key in changes:
        if key not in fields:
            raise UnknownNameError(
                "key", key, [f for f in fields if f in NormsmithConfig.__annotations__], "the model configuration"
            )
    return NormsmithConfig(**{**PRESETS[known_preset(preset)], **changes})


def known_preset(name: str) -> str:
    """Return `name` if it is a preset, else raise `UnknownNameError` with the nearest ones."""
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return name


def initial_deviations(config: NormsmithConfig) -> dict[str, float]:
    """Standard deviation of the initial weights by the role of a projection: q, k, v, o, gate, up, down."""
    family, total = connections.get(config.connection_spec.kind), 2 * config.num_hidden_layers
    return {
        role: config.initializer_range * family.deviation(role, total, config.scale_residual_init)
        for role in ("q", "k", "v", "o", "gate", "up", "down")
    }
