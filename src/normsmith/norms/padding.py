"""Tell norms that pool over tokens which of them are padding."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from normsmith.errors import InputError
from normsmith.norms.base import Norm, NormConfig
from normsmith.traits import generates, is_encoder_decoder


class PaddingWatch:
    """A forward pre-hook of a model: hands the model's own `attention_mask` to its norms.

    An `inner` model that gets a mask in another form leaves what the model around it has said.
    """

    def __init__(self, norms: list[Norm], position: int, inner: bool = False) -> None:
        self.norms, self.position, self.inner = norms, position, inner

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called with the arguments of the model's forward."""
        mask = args[self.position] if len(args) > self.position else kwargs.get("attention_mask")
        if self.inner and mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            return
        for norm in self.norms:
            setattr(norm, "token_mask", mask if isinstance(mask, Tensor) and mask.ndim == 2 else None)  # noqa: B010


def watch_padding(model: nn.Module) -> None:
    """From now on let the norms of `model` leave out the tokens that its (batch, time) `attention_mask` masks.

    Nothing happens for a model that takes no such mask, or that has an encoder and a decoder, where it may belong to
    either. Called again after the norms have changed, it watches for the new ones. Models of transformers inside it are
    watched as well: users call them alone, and the mask of an earlier pass must not count then.
    """
    if is_encoder_decoder(model):
        return
    for module in model.modules():
        if module is model or hasattr(module, "from_pretrained"):
            _watch(module, inner=module is not model)


def _watch(model: nn.Module, inner: bool) -> None:
    names = list(inspect.signature(model.forward).parameters)
    wanting = [m for m in model.modules() if isinstance(m, Norm) and hasattr(m, "token_mask")]
    if "attention_mask" not in names:
        return
    for hook in model._forward_pre_hooks.values():  # pyright: ignore[reportPrivateUsage]
        if isinstance(hook, PaddingWatch):
            hook.norms = wanting
            return
    if wanting:
        watch = PaddingWatch(wanting, names.index("attention_mask"), inner)
        model.register_forward_pre_hook(watch, with_kwargs=True)


def pools_sequence(config: NormConfig) -> bool:
    """Whether the norm, or one that it is made of, looks at all tokens of a sequence."""
    parts = getattr(config, "candidates", ())
    return getattr(config, "pool", "token") == "sequence" or any(pools_sequence(part) for part in parts)


def refuse_pooling(config: NormConfig, where: str) -> None:
    """Raise for a norm that pools over the sequence in a model whose tokens must not see later ones."""
    if pools_sequence(config):
        raise InputError(
            f"{where} is causal, and {config.kind} with pool='sequence' would let each token see later ones; "
            "write pool='token'"
        )


def check_pooling(model: nn.Module, config: NormConfig) -> None:
    """`refuse_pooling` for a model that says it generates text from left to right, and for one with a decoder."""
    settings = getattr(model, "config", None)
    decodes = any(getattr(settings, name, False) is True for name in ("is_decoder", "causal"))
    if decodes or is_encoder_decoder(model) or generates(model):
        refuse_pooling(config, type(model).__name__)
