"""Stock and ONNX: the original class with linear norms, and a graph that onnxruntime agrees with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import normsmith as ns
from normsmith.errors import InputError
from normsmith.norms.tapered import TaperedNorm
from normsmith.surgery.export import export_model
from tests.tiny import apart, example, output, tiny


def tapered(family: str, placement: str = "all") -> Any:
    """A model whose tapered norms are linear now."""
    model = tiny(family)
    ns.taper_(model, {"scale_loss": 0.0, "placement": placement}, steps=10, example=example(model)).close()
    for norm in (m for m in model.modules() if isinstance(m, TaperedNorm)):
        norm.gate.zero_()
        norm.gate_eval.zero_()
        norm.scale.fill_(0.7)
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma", "gpt_neox"])
def test_stock_models_compute_the_same_in_their_own_class(family: str, tmp_path: Path) -> None:
    model = tapered(family)
    said = export_model(model, tmp_path, "stock")
    assert "brings no speed" in said
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert apart(output(again), output(model)) <= 1e-5


def test_stock_models_keep_bfloat16(tmp_path: Path) -> None:
    model = tapered("llama").bfloat16()
    export_model(model, tmp_path, "stock")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert apart(output(again).float(), output(model).float()) <= 5e-2


def test_stock_is_refused_where_it_would_not_hold(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"1 norm\(s\) still depend on the token: model.norm \(rmsnorm\).*placement='all'"
    ):
        export_model(tapered("llama", "internal"), tmp_path, "stock")
    with pytest.raises(InputError, match="do not fit into float16"):
        export_model(tapered("llama").half(), tmp_path, "stock")
    folded = tapered("gpt2")
    ns.fold_(folded)
    with pytest.raises(InputError, match=r"has no lm_head.bias, which folding made.*before it is folded"):
        export_model(folded, tmp_path, "stock")
    with pytest.raises(InputError, match="OPTConfig has no eps that could be set"):
        export_model(tapered("opt"), tmp_path, "stock")
    assert not list(tmp_path.iterdir())


def test_a_folded_model_without_new_biases_can_be_stock(tmp_path: Path) -> None:
    model = tapered("llama")
    ns.fold_(model)
    export_model(model, tmp_path, "stock")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert apart(output(again), output(model)) <= 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_onnx_agrees_with_onnxruntime_at_any_length(family: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'normsmith[onnx]'")
    model = tapered(family, "internal")
    ns.fold_(model)
    assert "onnxruntime's outputs differ by" in export_model(model, tmp_path, "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    assert names == ["input_ids"]
    for shape in ((1, 5), (3, 20)):
        ids = torch.randint(3, 60, shape)
        got = torch.from_numpy(session.run(None, {"input_ids": ids.numpy()})[0])
        with torch.no_grad():
            assert apart(got, model(input_ids=ids).logits) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_onnx_of_half_precision_is_float32_and_says_so(dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="pip install 'normsmith[onnx]'")
    model = tiny("llama").to(dtype).train()
    said = export_model(model, tmp_path, "onnx")
    assert f"in float32 (the model is {str(dtype).removeprefix('torch.')})" in said
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(module.training for module in model.modules())


def test_onnx_of_a_model_of_ones_own(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="pip install 'normsmith[onnx]'")
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)).eval()
    x = torch.randn(2, 8)
    assert (tmp_path / "model.onnx").exists() is False
    export_model(model, tmp_path, "onnx", example=x)
    assert (tmp_path / "model.onnx").exists()
    with pytest.raises(InputError, match="one tensor or a mapping"):
        export_model(model, tmp_path, "onnx", example=[x])
