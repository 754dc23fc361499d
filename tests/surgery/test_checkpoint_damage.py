"""Damaged checkpoints, wrong outputs, full disks, interruptions: a clear error, and nothing half done."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from normsmith.errors import InputError
from normsmith.surgery import CheckpointReport, fold_checkpoint
from tests.surgery.checkpoints import INDEX, contents, edit_json, error, exact, load, make, stored


def _rewrite(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / shard_of(folder, "model.norm.weight")
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return damage


def shard_of(folder: Path, name: str) -> str:
    return json.loads((folder / INDEX).read_text())["weight_map"][name]


def _drop(folder: Path) -> None:
    _rewrite(lambda tensors: tensors.pop("model.norm.weight"))(folder)
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop("model.norm.weight"))


def _pickle(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def _cut(folder: Path, size: int) -> None:
    path = folder / "model-00002-of-00005.safetensors"
    path.write_bytes(path.read_bytes()[:size])


def _config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda config: config.update(changes))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "model: holds no model .config.json is missing"),
    "config": (lambda f: (f / "config.json").write_text("{"), "model/config.json: cannot be read"),
    "list": (lambda f: (f / "config.json").write_text("[]"), "model/config.json: holds no JSON object"),
    "pickle": (_pickle, "model/pytorch_model.bin: is a pickle, which can run code .* only safetensors are read"),
    "nothing": (lambda f: [p.unlink() for p in f.glob("model*")], "model: holds no weights .model.safetensors or"),
    "truncated": (lambda f: _cut(f, -100), "model-00002-of-00005.safetensors: is truncated or damaged"),
    "header": (lambda f: _cut(f, 20), "model-00002-of-00005.safetensors: is truncated or damaged"),
    "empty": (lambda f: _cut(f, 0), "model-00002-of-00005.safetensors: is truncated or damaged"),
    "no shard": (lambda f: (f / "model-00002-of-00005.safetensors").unlink(), "00002-of-00005.safetensors: .*missing"),
    "index": (lambda f: (f / INDEX).write_text("{"), f"model/{INDEX}: cannot be read"),
    "no map": (lambda f: (f / INDEX).write_text("{}"), f"model/{INDEX}: has no weight_map"),
    "elsewhere": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update({"x": "../x.safetensors"})),
        f"model/{INDEX}: x shall lie in '../x.safetensors', which is no name of a file in this folder",
    ),
    "entry": (
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].pop("model.norm.weight")),
        f"model/{INDEX}: has no entry for model.norm.weight, which lies in model-0000",
    ),
    "tensor": (
        _rewrite(lambda tensors: tensors.pop("model.norm.weight")),
        f"model/{INDEX}: says that model.norm.weight lies in model-0000.*, which holds no such tensor",
    ),
    "half": (_drop, "model: the files hold no model.norm.weight, which the model needs; the checkpoint is incomplete"),
    "shape": (
        _rewrite(lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)})),
        r"safetensors: model.norm.weight has the shape \[31\], the configuration says \[32\]",
    ),
    "integers": (
        _rewrite(lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})),
        r"safetensors: model.norm.weight is quantised \(I8\)",
    ),
    "quantised": (_config(quantization_config={"bits": 4}), "model/config.json: the model is quantised"),
    "layers": (_config(num_hidden_layers=3), r"model: the files hold no model.layers.2\."),
    "width": (_config(hidden_size=64), "has the shape"),
    "wrong value": (_config(hidden_size="wide"), "model/config.json: no model can be made from it"),
    "family": (_config(model_type="llamma"), "model/config.json: no model can be made from it"),
    "class": (
        _config(architectures=["LamaForCausalLM"]),
        "transformers .* has no class 'LamaForCausalLM'",
    ),
    "no class": (_config(architectures=None), "model/config.json: names no architecture"),
    "no model": (_config(architectures=["AutoTokenizer"]), "has no class 'AutoTokenizer'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint(name: str, llama: Path, tmp_path: Path) -> None:
    damage, message = DAMAGES[name]
    damage(llama)
    before = contents(tmp_path)
    with pytest.raises(InputError, match=message):
        fold_checkpoint(llama, tmp_path / "out")
    assert contents(tmp_path) == before


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    source = stored(tmp_path / "model", make("mixtral"), "5GB")
    path, name = source / "model.safetensors", "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    save_file({key: tensor for key, tensor in load_file(path).items() if key != name}, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"layers.1.mlp.experts.gate_up_proj is put together .* incomplete"):
        fold_checkpoint(source, tmp_path / "out")


def test_a_product_that_float16_cannot_hold(tmp_path: Path) -> None:
    model = make("llama", torch.float16)
    model.model.norm.weight.data[3] = 300
    model.lm_head.weight.data[5, 3] = 300
    source = stored(tmp_path / "model", model)
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"lm_head.weight times the norm's gain is too large for float16"):
        fold_checkpoint(source, tmp_path / "out")
    assert contents(tmp_path) == before


def test_an_output_that_would_harm_something(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").touch()
    before = contents(tmp_path)
    for source, output, message in (
        ("absent", "out", "absent: no such folder"),
        ("model/config.json", "out", "config.json: is a file, expected a model folder"),
        ("model", "model", "lies inside the input"),
        ("model", "model/out", "lies inside the input"),
        ("model", ".", "holds the input"),
        ("model", "mine", "exists and is not empty|was not written by normsmith"),
    ):
        for overwrite in (False, True):
            with pytest.raises(InputError, match=message):
                fold_checkpoint(tmp_path / source, tmp_path / output, overwrite=overwrite)
    assert contents(tmp_path) == before


REMOTE = """
from pathlib import Path
from transformers import LlamaForCausalLM
Path({trace!r}).touch()
class OwnForCausalLM(LlamaForCausalLM):
    pass
"""


def test_remote_code_runs_only_when_allowed(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "modules"), *sys.path])
    (llama / "modeling_own.py").write_text(REMOTE.format(trace=str(tmp_path / "ran")))
    _config(auto_map={"AutoConfig": "modeling_own.OwnConfig"})(llama)  # a class of transformers' needs none of it
    assert len(fold_checkpoint(llama, tmp_path / "native").absorbed) == 5
    assert not (tmp_path / "ran").exists()
    auto = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    _config(architectures=["OwnForCausalLM"], auto_map=auto)(llama)
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"OwnForCausalLM is defined by Python files .*trust_remote_code=True"):
        fold_checkpoint(llama, tmp_path / "out")
    assert contents(tmp_path) == before
    report = fold_checkpoint(llama, tmp_path / "out", trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    assert len(report.absorbed) == 5
    assert (tmp_path / "out/modeling_own.py").exists()


# -- interruptions


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 64 kB; only root can make one."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no permission to mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk(llama: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk"):
        with pytest.raises(InputError, match=r"out: cannot be written \(No space left on device\)"):
            fold_checkpoint(llama, tmp_path / "disk/out")
        assert contents(tmp_path / "disk") == {}


def test_a_file_that_may_not_grow(llama: Path, tmp_path: Path) -> None:
    """Like a full disk, for those who cannot mount one: the kernel refuses to write more than 10 kB to a file."""
    resource = pytest.importorskip("resource")
    before, limits = contents(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(InputError, match=r"out: cannot be written \(File too large\)"):
            fold_checkpoint(llama, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert contents(tmp_path) == before


SLOW = """
import signal, sys, time
from normsmith.surgery import fold_checkpoint

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell hands down an ignored one

def tick(done, total):
    print(done, flush=True)
    time.sleep(60)

fold_checkpoint(sys.argv[1], sys.argv[2], tick=tick)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_rerun_finishes_after_an_interruption(number: signal.Signals, llama: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    command = [sys.executable, "-c", SLOW, str(llama), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip().isdecimal()  # in the middle of writing
    parts = list(tmp_path.glob(".out.*.part"))
    assert len(parts) == 1
    os.kill(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    if number == signal.SIGINT:
        assert contents(tmp_path) == before
    else:
        assert parts[0].exists()
    report = fold_checkpoint(llama, tmp_path / "out")
    assert isinstance(report, CheckpointReport)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}
    assert error(exact(load(tmp_path / "out")), exact(load(llama))) <= 1e-6


def test_another_process_that_is_still_writing_is_left_alone(llama: Path, tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    part = tmp_path / f".out.{other.pid}.part"
    part.mkdir()
    try:
        fold_checkpoint(llama, tmp_path / "out")
        assert part.exists()
    finally:
        other.kill()
        other.wait()
    fold_checkpoint(llama, tmp_path / "out", overwrite=True)
    assert not part.exists()
