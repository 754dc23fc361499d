"""The sublayers of the reference transformer and the block that connects them to the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from normsmith.connections import connections, make_norm
from normsmith.models.branch import make_branch
from normsmith.models.config import NormsmithConfig
from normsmith.norms import Norm
from normsmith.norms.base import Stateful

Rotation = tuple[Tensor, Tensor]


class Rotary(Stateful):
    """Cosines and sines of the rotary positions, (batch, time) → two of (batch, 1, time, head width).

    The frequencies stay float32 when the model's dtype changes: rounded, they are off by ever more from token to token.
    """

    inverse_frequency: Tensor

    def __init__(self, head_width: int, theta: float) -> None:
        super().__init__()
        self.head_width, self.theta = head_width, theta
        self.register_buffer("inverse_frequency", self.frequencies(), persistent=False)

    def frequencies(self) -> Tensor:
        """θ^(−2i/head width) for i in 0 … head width / 2 − 1, float32."""
        return self.theta ** -(torch.arange(0, self.head_width, 2, dtype=torch.float32) / self.head_width)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> Rotation:
        """Angles are computed in float32 whatever the dtype of the result."""
        angles = position_ids[:, None, :, None].float() * self.inverse_frequency.float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn x, (batch, heads, time, head width), by its positions; the two halves of a head are paired."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ·scaling + mask)·v, the `eager` implementation in transformers' attention interface."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) if groups > 1 else t for t in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def projection(role: str, inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A linear layer with an attribute `role` (q, k, v, o, gate, up, down, head), which decides how it starts."""
    linear = nn.Linear(inputs, outputs, bias=bias)
    setattr(linear, "role", role)  # noqa: B010 (untyped on purpose: it is a plain linear layer for everybody else)
    return linear


class Attention(nn.Module):
    """Self-attention, causal or not, with optional grouped queries and rotary positions.

    The family of connections can ask for norms on q, k and v (`attention_norms`) and for `attention_scale`.
    """

    sites: ClassVar[dict[str, str]] = {"q_norm": "qk", "k_norm": "qk", "v_norm": "qk"}
    q_norm: Norm | None
    k_norm: Norm | None
    v_norm: Norm | None

    def __init__(self, config: NormsmithConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer
        self.is_causal = config.causal  # read by transformers' sdpa and flash implementations
        heads, kv_heads = config.num_attention_heads, cast("int", config.num_key_value_heads)
        d = config.hidden_size
        self.head_dim = d // heads
        self.num_key_value_groups = heads // kv_heads
        self.scaling = self.head_dim**-0.5
        bias, narrow = bool(config.input_bias), kv_heads * self.head_dim
        self.q_proj = projection("q", d, d, bias)
        self.k_proj = projection("k", d, narrow, bias)
        self.v_proj = projection("v", d, narrow, bias)
        self.o_proj = projection("o", d, d, config.use_bias)
        self.family = connections.get(config.connection_spec.kind)
        for site, width in zip(self.sites, (d, narrow, narrow), strict=True):
            self.register_module(site, make_norm(self.family.attention_norms.get(site, "identity"), width))
        self.scale = self.family.attention_scale(kv_heads, self.head_dim)
        if self.scale is not None:
            self.scaling = cast("float", self.scale.softmax_scale)

    def roles(self) -> dict[str, str]:
        """The norm sites that the family of connections asks for, as those of a connection."""
        return {site: self.sites[site] for site in self.family.attention_norms}

    def forward(
        self, x: Tensor, rotation: Rotation | None, attention_mask: Tensor | None, cache: Cache | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(batch, time, d) → (batch, time, d) and the attention weights, where the implementation returns them."""
        batch, time, _ = x.shape

        def heads(t: Tensor) -> Tensor:
            return t.view(batch, time, -1, self.head_dim).transpose(1, 2)

        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        v = v if self.v_norm is None else self.v_norm(v)
        q, k, v = heads(q), heads(k), heads(v)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if self.scale is not None:
            q, k = self.scale(q, k)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        implementation = self.config._attn_implementation or "eager"  # pyright: ignore[reportPrivateUsage]
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        out, weights = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(batch, time, -1)), weights


class SwiGLU(nn.Module):
    """down(silu(gate(x)) ⊙ up(x))."""

    def __init__(self, config: NormsmithConfig) -> None:
        super().__init__()
        d, hidden = config.hidden_size, cast("int", config.intermediate_size)
        self.gate_proj = projection("gate", d, hidden, bool(config.input_bias))
        self.up_proj = projection("up", d, hidden, bool(config.input_bias))
        self.down_proj = projection("down", hidden, d, config.use_bias)
        family = connections.get(config.connection_spec.kind)
        self.gate_scale = family.hidden_scale(hidden, d, activated=True)
        self.up_scale = family.hidden_scale(hidden, d, activated=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        gate = gate if self.gate_scale is None else self.gate_scale(gate)
        up = up if self.up_scale is None else self.up_scale(up)
        return self.down_proj(F.silu(gate) * up)


class GeluMLP(nn.Module):
    """down(gelu(up(x))) with the tanh form of GELU."""

    def __init__(self, config: NormsmithConfig) -> None:
        super().__init__()
        d, hidden = config.hidden_size, cast("int", config.intermediate_size)
        self.up_proj = projection("up", d, hidden, bool(config.input_bias))
        self.down_proj = projection("down", hidden, d, config.use_bias)
        self.up_scale = connections.get(config.connection_spec.kind).hidden_scale(hidden, d, activated=True)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        up = self.up_proj(x)
        return self.down_proj(F.gelu(up if self.up_scale is None else self.up_scale(up), approximate="tanh"))


class Block(GradientCheckpointingLayer):
    """Attention, then MLP, each joined to the stream by its connection."""

    def __init__(self, config: NormsmithConfig, layer: int) -> None:
        super().__init__()
        connection, norm, d = config.connection_spec, config.norm_spec, config.hidden_size
        kind, total = connections.get(connection.kind), 2 * config.num_hidden_layers
        self.attention_connection = kind(d, 2 * layer + 1, total, norm, connection)
        self.self_attn = Attention(config, layer)
        self.mlp_connection = kind(d, 2 * layer + 2, total, norm, connection)
        self.mlp = SwiGLU(config) if config.mlp == "swiglu" else GeluMLP(config)
        self.attention_branch, self.mlp_branch = make_branch(config, layer), make_branch(config, layer)

    def forward(
        self,
        hidden_states: Tensor,
        rotation: Rotation | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(batch, time, d) → (batch, time, d), the stream before and after the block."""
        h = hidden_states
        x = self.attention_connection.prepare(h)
        out, _ = self.self_attn(x, rotation=rotation, attention_mask=attention_mask, cache=cache, **kwargs)
        h = self.attention_connection.merge(h, out if self.attention_branch is None else self.attention_branch(out))
        out = self.mlp(self.mlp_connection.prepare(h))
        return self.mlp_connection.merge(h, out if self.mlp_branch is None else self.mlp_branch(out))
