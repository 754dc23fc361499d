"""Model folders are read whole, without pickles and without code that was not allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from normsmith.errors import InputError
from normsmith.surgery.load import load_model
from tests.tiny import apart, output, tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit"])
def test_any_family_loads_as_the_class_it_was_saved_from(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    assert type(again) is type(model)
    assert not again.training
    assert apart(output(again), output(model)) <= 1e-6


def test_the_dtype_of_the_files_is_kept(tmp_path: Path) -> None:
    tiny("llama").bfloat16().save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == torch.bfloat16


def test_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"config.json is missing"):
        load_model(tmp_path)
    for text in ("{", "[1]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=r"config.json: (cannot be read|holds no JSON object)"):
            load_model(tmp_path)


def test_pickles_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model.bin is a pickle, which can run any code.*safetensors first"):
        load_model(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match="holds no weights"):
        load_model(folder)


def test_damaged_and_half_loaded_checkpoints(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(folder)
    path.write_bytes(whole)
    tensors = load_file(path)
    gone = tensors.pop("model.norm.weight")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(InputError, match=r"do not match \(1 tensors\); first difference: model.norm.weight"):
        load_model(folder)
    save_file({**tensors, "model.norm.weight": gone, "model.norm.gamma": gone.clone()}, path, {"format": "pt"})
    with pytest.raises(InputError, match=r"first difference: model.norm.gamma"):
        load_model(folder)
    save_file({**tensors, "model.norm.weight": torch.ones(7)}, path, {"format": "pt"})
    with pytest.raises(InputError, match=r"first difference: model.norm.weight"):
        load_model(folder)


def test_an_unknown_class_and_a_folders_own_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NewForCausalLM"]}))
    with pytest.raises(InputError, match="names no model class of transformers"):
        load_model(folder)
    (folder / "modeling_new.py").write_text("raise SystemExit('this must not run')\n")
    auto_map = {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    with pytest.raises(InputError, match=r"brings its own code \(modeling_new.py\)"):
        load_model(folder)
