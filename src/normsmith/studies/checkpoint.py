"""Model folders: load one, or write one whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError

from normsmith.errors import InputError
from normsmith.models import NormsmithConfig, NormsmithForCausalLM
from normsmith.studies.folders import write_folder


def load_checkpoint(folder: Path) -> NormsmithForCausalLM:
    """The reference model in `folder`, in evaluation mode.

    Raises:
        InputError: no such folder, no configuration, another model family, or missing or damaged weights.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    config = folder / "config.json"
    try:
        loaded: Any = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder}: holds no model (config.json is missing)") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{config}: cannot be read ({error})") from None
    kind = cast("dict[str, Any]", loaded).get("model_type") if isinstance(loaded, dict) else None
    if kind != NormsmithConfig.model_type:
        raise InputError(f"{folder}: is a {kind or 'model of unknown type'!r}, not a model that normsmith trained")
    try:
        loading: Any = NormsmithForCausalLM.from_pretrained(str(folder), output_loading_info=True)
        model, info = loading
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise InputError(f"{folder}: the weights cannot be read ({' '.join(str(error).split())})") from None
    wrong = sorted({*info["missing_keys"], *info["unexpected_keys"]})
    if wrong:
        raise InputError(f"{folder}: weights and configuration do not match; first difference: {wrong[0]}")
    return cast("NormsmithForCausalLM", model.eval())


def save_checkpoint(model: NormsmithForCausalLM, source: Path, output: Path, overwrite: bool) -> None:
    """Write `model` to `output` with the tokenizer files of `source`; the folder appears complete or not at all.

    Raises:
        InputError: `output` is not empty (without `overwrite`), lies inside `source` or is it, or cannot be written.
    """
    if output.resolve() == source.resolve() or source.resolve() in output.resolve().parents:
        raise InputError(f"{output}: lies inside the input {source}; choose a folder outside")

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            if (source / name).exists():
                shutil.copy2(source / name, folder / name)

    write_folder(output, write, overwrite)
