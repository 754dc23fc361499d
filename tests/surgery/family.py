"""How the families that surgery must work on are described: a tiny model, and what is right for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from normsmith.norms import Norm
from normsmith.surgery.example import make_example

ROPE = "no linear layer reads it, but mul, neg"  # queries and keys are rotated, not multiplied by a weight
STREAM = "also feeds the residual stream"
RETURNED = "the model returns it"
NORM = "also read by another norm"
ENTRY = f"{STREAM}; {NORM}"  # the embeddings' norm: start of the stream, and input of the first pre-norm


@dataclass(frozen=True)
class At:
    """What must be found at the sites that match `pattern`.

    `readers` are the last parts of the readers' names. `blocked` is why gain and shift cannot go into readers, and
    `producer` the linear layer that a linear norm is folded into all the same. `plain` says that it is an ordinary
    one-dimensional LayerNorm or RMSNorm, which others can take over.
    """

    pattern: str
    count: int
    role: str
    readers: str = ""
    blocked: str = ""
    producer: str = ""
    plain: bool = True

    @property
    def folds_fully(self) -> bool:
        """Whether it can be removed once it is linear."""
        return self.plain and (not self.blocked or bool(self.producer))


@dataclass(frozen=True)
class Family:
    """One family: how to build a tiny model, an input for it, and its sites.

    `formula` is how its norms compute y from the normalised n. `new_biases` are the readers that have no bias although
    their norm has a shift, `reloads` says whether a model with such new biases comes back from a folder.
    """

    title: str
    build: Callable[[], nn.Module]
    kind: str
    sites: tuple[At, ...]
    formula: str = "w·n"
    tied: bool = False
    new_biases: str = ""
    reloads: bool = False
    example: Callable[[torch.Generator], Any] | None = None

    def inputs(self, model: nn.Module, seed: int) -> Any:
        """An input for one forward pass, in the model's dtype."""
        if self.example is None:
            return make_example(model, seed)
        dtype = next(p.dtype for p in model.parameters())
        example = self.example(torch.Generator().manual_seed(seed))
        cast = [t.to(dtype) if t.is_floating_point() else t for t in example]
        return tuple(cast)

    def model(self) -> nn.Module:
        """The model in evaluation mode, with parameters that hide no mistake."""
        torch.manual_seed(0)
        return randomize(self.build().eval())


@torch.no_grad()
def randomize(model: nn.Module) -> nn.Module:
    """Gains of both signs far from 1, shifts and biases far from 0, weights so large that attention is not uniform."""
    generator = torch.Generator().manual_seed(3)

    def noise(p: Tensor) -> Tensor:
        return torch.randn(p.shape, generator=generator)

    norms = [m for m in model.modules() if isinstance(m, Norm) or "norm" in type(m).__name__.lower()]
    gains = {id(p) for m in norms for p in m.parameters(recurse=False)}
    for parameter in model.parameters():
        if id(parameter) in gains:
            parameter.copy_(0.6 * noise(parameter) + 0.2)
        elif parameter.ndim < 2:
            parameter.copy_(parameter + 0.3 * noise(parameter))
        else:
            parameter.copy_(0.25 * noise(parameter))
    return model


def hugging_face(config: Callable[[], Any], auto: str = "AutoModelForCausalLM") -> Callable[[], nn.Module]:
    """What makes the model of this class from the configuration."""
    return lambda: getattr(transformers, auto).from_config(config())


TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    **TOKENS,
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
}
GPT: dict[str, Any] = {**TOKENS, "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GROUPED: dict[str, Any] = {**SIZES, "max_position_embeddings": 64, "num_key_value_heads": 2}
VISION: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8},
}
