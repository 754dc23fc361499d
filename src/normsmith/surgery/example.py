"""Make an input for a model and run it once."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.errors import InputError
from normsmith.traits import is_encoder_decoder

_PASSED_ON = {"self", "args", "kwargs"}


def run_example(model: nn.Module, example: Any = None, seed: int = 0) -> Any:
    """One forward pass on `example`: a mapping of arguments, a tensor, a tuple of arguments, or None to make one.

    Its tensors go to the device where the model is, which may be another one after a training.
    """
    example = make_example(model, seed) if example is None else placed(model, example)
    # Compiled code has no operations to watch.
    with torch.compiler.set_stance("force_eager"), _shape_only_experts(model):
        if isinstance(example, dict) or hasattr(example, "keys"):
            return model(**example)
        return model(*example) if isinstance(example, tuple) else model(example)


def placed(model: nn.Module, example: Any) -> Any:
    """The example (a mapping, a tuple, a tensor) with its tensors on the model's device."""
    device = next((p.device for p in model.parameters()), None)
    if device is None or hasattr(model, "_hf_hook"):  # accelerate's hooks place the inputs of an offloaded model
        return example
    if hasattr(example, "keys"):
        return {name: placed(model, value) for name, value in example.items()}
    if isinstance(example, tuple):
        return tuple(placed(model, value) for value in example)
    return example.to(device) if isinstance(example, Tensor) else example


@contextmanager
def _shape_only_experts(model: Any) -> Generator[None]:
    """On the meta device, let experts compute in the one way of transformers' that needs no values."""
    config = getattr(model, "config", None)
    before = getattr(config, "_experts_implementation", None)
    if before is None or not next(model.parameters()).is_meta:
        yield
        return
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def make_example(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Arguments for one forward pass of a Hugging Face model, by its signature: token ids, pixels, audio features or a
    table's rows.

    Raises:
        InputError: the model has no config to read sizes from, or takes inputs of another sort.
    """
    config: Any = getattr(model, "config", None)
    forward = _arguments(model)
    makers = {
        "input_ids": _token_ids,
        "pixel_values": _pixels,
        "input_features": _audio,
        "features": _rows,
        "decoder_input_ids": _token_ids,
    }
    wanted = [name for name in makers if name in forward]
    if "input_ids" in wanted and "pixel_values" in wanted and not _part(config, "text_config"):
        wanted.remove("pixel_values")
    if not is_encoder_decoder(model):
        wanted = [name for name in wanted if name != "decoder_input_ids"]
    generator = torch.Generator().manual_seed(seed)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        example = {name: makers[name](config, generator) for name in wanted}
    except (AttributeError, TypeError):
        example = {}
    if not example:
        raise InputError(
            f"{type(model).__name__} has no config that says what it takes: pass example=, an input for one forward "
            "pass, for instance example=torch.randn(2, 16, 64)"
        )
    example = {name: value.to(device) for name, value in _in_dtype(model, example).items()}
    return _in_units(model, example)


def _arguments(model: nn.Module) -> set[str]:
    """What the forward pass takes by name; where it only passes on what it gets, what the one within takes."""
    base: Any = getattr(model, "get_base_model", lambda: model)()  # of PEFT's models
    names = set(inspect.signature(base.forward).parameters)
    if names <= _PASSED_ON:
        own = [cls.forward for cls in type(base).__mro__ if "forward" in vars(cls)]
        names = next((found for f in own if not (found := set(inspect.signature(f).parameters)) <= _PASSED_ON), names)
    return names


def _in_units(model: nn.Module, example: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pixels and rows as a model that standardises them takes them: with the moments of its training data."""
    standardise: Any = getattr(model, "standardise", None)
    axes = {"pixel_values": 1, "features": -1} if hasattr(standardise, "invert") else {}
    return {
        name: standardise.invert(value.movedim(axes[name], -1)).movedim(-1, axes[name]) if name in axes else value
        for name, value in example.items()
    }


def _in_dtype(model: nn.Module, example: dict[str, Tensor]) -> dict[str, Tensor]:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in example.items()}


def _part(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def _token_ids(config: Any, generator: torch.Generator) -> Tensor:
    vocab_size = getattr(_part(config, "text_config") or config, "vocab_size")  # noqa: B009 (must raise if missing)
    return torch.randint(vocab_size, (2, 16), generator=generator)


def _pixels(config: Any, generator: torch.Generator) -> Tensor:
    config = _part(config, "vision_config") or config
    size = config.image_size if isinstance(config.image_size, tuple | list) else (config.image_size,) * 2
    return torch.randn(2, config.num_channels, *size, generator=generator)


def _rows(config: Any, generator: torch.Generator) -> Tensor:
    return torch.randn(2, config.num_features, generator=generator)


def _audio(config: Any, generator: torch.Generator) -> Tensor:
    return torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
