"""Model folders: load one, or write one whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from transformers.utils import logging

from normsmith import models
from normsmith.errors import InputError
from normsmith.folders import check_output, write_folder
from normsmith.models import NormsmithConfig, NormsmithPreTrainedModel
from normsmith.surgery.shards import read_config


def model_type(folder: Path) -> str | None:
    """The family that the configuration in `folder` names, or None if it names none.

    Raises:
        InputError: no such folder, or no configuration that can be read.
    """
    kind = read_config(folder).get("model_type")
    return kind if isinstance(kind, str) else None


def _classes() -> dict[str, type[NormsmithPreTrainedModel]]:
    """Name → class of every model that `normsmith train` writes."""
    found = {name: cls for name, cls in vars(models).items() if isinstance(cls, type)}
    return {name: cls for name, cls in found.items() if issubclass(cls, NormsmithPreTrainedModel)}


def is_own(folder: Path) -> bool:
    """Whether the model in `folder` is of one of normsmith's own classes."""
    return model_type(folder) in {_config_class(cls).model_type for cls in _classes().values()}


def _config_class(cls: type[NormsmithPreTrainedModel]) -> type[NormsmithConfig]:
    return cast("type[NormsmithConfig]", cls.config_class)


def load_checkpoint(folder: Path) -> NormsmithPreTrainedModel:
    """The reference model in `folder`, for language or another task, in evaluation mode.

    Raises:
        InputError: no such folder, no configuration, another model family, or missing or damaged weights.
    """
    config = folder / "config.json"
    if not is_own(folder):
        kind = model_type(folder) or "model of unknown type"
        raise InputError(f"{folder}: is a {kind!r}, not a model that normsmith trained")
    name = next(iter(read_config(folder).get("architectures") or ()), "NormsmithForCausalLM")
    cls = _classes().get(name)
    if cls is None:
        raise InputError(f"{config}: names no class of normsmith ({name}); known: {', '.join(sorted(_classes()))}")
    try:
        built = _config_class(cls).from_pretrained(str(folder))
    except InputError as error:
        raise InputError(f"{config}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # values of the wrong type, edited by hand
        raise InputError(f"{config}: holds a wrong value ({' '.join(str(error).split())})") from None
    try:
        model, info = _load(folder, cls, built)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise InputError(f"{folder}: the weights cannot be read ({' '.join(str(error).split())})") from None
    sizes = {entry[0] for entry in info["mismatched_keys"]}
    wrong = sorted({*info["missing_keys"], *info["unexpected_keys"], *sizes})
    if wrong:
        raise InputError(f"{folder}: weights and configuration do not match; first difference: {wrong[0]}")
    return cast("NormsmithPreTrainedModel", model.eval())


def _load(folder: Path, cls: type[NormsmithPreTrainedModel], config: NormsmithConfig) -> tuple[Any, dict[str, Any]]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # differences are named in our error, not in transformers' table of them
    try:
        loading: Any = cls.from_pretrained(
            str(folder), config=config, output_loading_info=True, ignore_mismatched_sizes=True
        )
    finally:
        logging.set_verbosity(before)
    return loading


def save_checkpoint(model: NormsmithPreTrainedModel, source: Path, output: Path, overwrite: bool) -> None:
    """Write `model` to `output` with the tokenizer files of `source`; the folder appears complete or not at all.

    Raises:
        InputError: as `check_output`.
    """
    check_output(source, output, overwrite)

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            if (source / name).exists():
                shutil.copy2(source / name, folder / name)

    write_folder(output, write, overwrite)
