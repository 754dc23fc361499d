"""Reading and writing model folders, for the verbs that change somebody's model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

DeviceOption = Annotated[
    str | None, typer.Option("--device", help="As cpu or cuda:0 [a GPU if there is one].", show_default=False)
]
TrustFlag = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the modelling code that the model folder brings.")
]
WhereOption = Annotated[
    str | None, typer.Option("--where", help="Sites: roles or name patterns, with commas, as `pre,final` or `*.0.*`.")
]
# What the model writes itself; everything else (tokenizer, generation settings, licence) is copied.
_OWN = ("config.json", "generation_config.json", "modeling_normsmith.py", ".normsmith")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json", ".onnx")


def load_any(folder: Path, trust_remote_code: bool = False) -> Any:
    """A model that normsmith trained, or any Hugging Face model."""
    from transformers.utils import logging

    from normsmith.studies.checkpoint import is_own, load_checkpoint
    from normsmith.surgery.load import load_model

    logging.disable_progress_bar()
    if is_own(folder):
        return load_checkpoint(folder)
    return load_model(folder, trust_remote_code)


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a model's folder; `InputError` where there is none."""
    from transformers import AutoTokenizer

    from normsmith.errors import InputError

    try:
        # Said either way: where a folder brings code, transformers would otherwise stop and ask at the terminal.
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder}: no tokenizer could be loaded ({' '.join(str(error).split())[:160]})") from None


def place(model: Any, device: str | None) -> Any:
    """The model on a device; without a name on the GPU, if there is one."""
    import torch

    from normsmith.errors import InputError

    try:
        return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device}: {' '.join(str(error).split())[:160]}") from None


def write_model(source: Path, output: Path, overwrite: bool, write: Callable[[Path], str]) -> str:
    """Let `write` fill the output folder, then add the other files of `source`; complete or not at all.

    Returns:
        What `write` returned.
    """
    from normsmith.folders import check_output, write_folder

    check_output(source, output, overwrite)
    said: list[str] = []

    def fill(folder: Path) -> None:
        said.append(write(folder))
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name not in _OWN and not path.name.endswith(_WEIGHTS):
                shutil.copy2(path, folder / path.name)

    write_folder(output, fill, overwrite)
    return said[0]
