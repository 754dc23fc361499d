"""Load any Hugging Face model folder, safely: safetensors and JSON only, no code from the folder unless allowed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from normsmith.errors import InputError
from normsmith.surgery.native import adopt_
from normsmith.surgery.shards import read_config


def load_model(folder: Path, trust_remote_code: bool = False) -> Any:
    """The model in a Hugging Face folder, in evaluation mode, on the CPU, in the dtype of its files.

    Args:
        folder: with config.json and safetensors files.
        trust_remote_code: run the modelling code that the folder brings, if it brings any.

    Raises:
        InputError: what is in the folder cannot be loaded, whole and without running code that was not allowed.
    """
    config = read_config(folder)
    if not list(folder.glob("*.safetensors")):
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
        if pickles:
            raise InputError(
                f"{folder}: {pickles[0]} is a pickle, which can run any code when it is read; convert it to "
                "safetensors first (load it where you trust it, then save_pretrained)"
            )
        raise InputError(f"{folder}: holds no weights (*.safetensors)")
    remote = config.get("auto_map")
    if remote and not trust_remote_code:
        files = ", ".join(sorted(path.name for path in folder.glob("*.py")))
        raise InputError(
            f"{folder}: brings its own code ({files}); read it, and allow it with trust_remote_code=True or "
            "--trust-remote-code"
        )
    loader = _loader(folder, config, bool(remote))
    model = _load(folder, loader, trust_remote_code)
    adopt_(model)
    return model


def _loader(folder: Path, config: dict[str, Any], remote: bool) -> Any:
    import transformers

    if remote:
        autos = [name for name in config["auto_map"] if name.startswith("AutoModel") and hasattr(transformers, name)]
        return getattr(transformers, autos[0] if autos else "AutoModel")
    names = config.get("architectures") or []
    found = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if found is None:
        raise InputError(f"{folder}: config.json names no model class of transformers (architectures: {names})")
    return found


def _load(folder: Path, loader: Any, trust_remote_code: bool) -> Any:
    from safetensors import SafetensorError
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # differences are named in our error, not in transformers' table of them
    options: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    try:
        model, info = loader.from_pretrained(
            str(folder),
            dtype="auto",
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{folder}: cannot be loaded ({' '.join(str(error).split())[:300]})") from None
    finally:
        logging.set_verbosity(before)
    heads = [name for name in info["unexpected_keys"] if _is_other_head(model, name)]
    unexpected = {*info["unexpected_keys"]} - {*heads}
    wrong = sorted({*info["missing_keys"], *unexpected, *(entry[0] for entry in info["mismatched_keys"])})
    if wrong:
        raise InputError(
            f"{folder}: weights and configuration do not match ({len(wrong)} tensors); first difference: {wrong[0]}"
        )
    if heads:
        parts = ", ".join(sorted({name.rpartition(".")[0] for name in heads}))
        warnings.warn(
            f"{folder}: {type(model).__name__} has no place for {parts}, which the folder holds too; it is left out",
            stacklevel=3,
        )
    return model.eval()


def _is_other_head(model: Any, name: str) -> bool:
    """Whether a tensor is of a part that other classes of the family have, as the pooler of a BERT with its MLM head.

    Not one of a numbered layer or of a module that is here: the configuration may say fewer layers, or no bias.
    """
    modules, parts = dict(model.named_modules()), name.split(".")
    known = max(i for i in range(len(parts)) if ".".join(parts[:i]) in modules)
    return not any(part.isdigit() for part in parts) and known < len(parts) - 1
