"""Model folders: load one, or write one whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from transformers.utils import logging

from normsmith.errors import InputError
from normsmith.folders import check_output, write_folder
from normsmith.models import NormsmithConfig, NormsmithForCausalLM
from normsmith.surgery.shards import read_config


def model_type(folder: Path) -> str | None:
    """The family that the configuration in `folder` names, or None if it names none.

    Raises:
        InputError: no such folder, or no configuration that can be read.
    """
    kind = read_config(folder).get("model_type")
    return kind if isinstance(kind, str) else None


def load_checkpoint(folder: Path) -> NormsmithForCausalLM:
    """The reference model in `folder`, in evaluation mode.

    Raises:
        InputError: no such folder, no configuration, another model family, or missing or damaged weights.
    """
    kind, config = model_type(folder), folder / "config.json"
    if kind != NormsmithConfig.model_type:
        raise InputError(f"{folder}: is a {kind or 'model of unknown type'!r}, not a model that normsmith trained")
    try:
        built = NormsmithConfig.from_pretrained(str(folder))
    except InputError as error:
        raise InputError(f"{config}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # values of the wrong type, edited by hand
        raise InputError(f"{config}: holds a wrong value ({' '.join(str(error).split())})") from None
    try:
        model, info = _load(folder, built)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise InputError(f"{folder}: the weights cannot be read ({' '.join(str(error).split())})") from None
    sizes = {entry[0] for entry in info["mismatched_keys"]}
    wrong = sorted({*info["missing_keys"], *info["unexpected_keys"], *sizes})
    if wrong:
        raise InputError(f"{folder}: weights and configuration do not match; first difference: {wrong[0]}")
    return cast("NormsmithForCausalLM", model.eval())


def _load(folder: Path, config: NormsmithConfig) -> tuple[Any, dict[str, Any]]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # differences are named in our error, not in transformers' table of them
    try:
        loading: Any = NormsmithForCausalLM.from_pretrained(
            str(folder), config=config, output_loading_info=True, ignore_mismatched_sizes=True
        )
    finally:
        logging.set_verbosity(before)
    return loading


def save_checkpoint(model: NormsmithForCausalLM, source: Path, output: Path, overwrite: bool) -> None:
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
