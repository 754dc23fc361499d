"""No norm and no connection waits for the device in a step: on the meta device, whoever asks for a value fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normsmith.connections import connections
from normsmith.models import (
    NormsmithConfig,
    NormsmithForCausalLM,
    NormsmithForImageClassification,
    NormsmithForSequenceClassification,
    NormsmithForTableRegression,
    NormsmithForTokenClassification,
    NormsmithTableConfig,
    NormsmithVisionConfig,
    preset_config,
)
from normsmith.norms import norms

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
META = torch.device("meta")


def train(model: Any, **inputs: Any) -> None:
    loss = model.train()(**inputs).loss
    loss.backward()
    assert all(p.grad is None or p.grad.is_meta for p in model.parameters())
    assert any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("preset", ["llama", "gpt"])
@pytest.mark.parametrize("option", [*(("norm", n) for n in norms), *(("connection", c) for c in connections)])
def test_a_step_of_a_language_model(option: tuple[str, str], preset: str) -> None:
    with META:
        model = NormsmithForCausalLM(preset_config(preset, vocab_size=60, **SIZES, **dict([option])))
        ids = torch.randint(60, (2, 8))
    train(model, input_ids=ids, labels=ids)


@pytest.mark.parametrize("norm", ["layernorm", {"kind": "autonorm", "pool": "sequence"}, "random_selector"])
def test_a_step_of_an_encoder(norm: Any) -> None:
    labels = {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}}
    config = NormsmithConfig(**SIZES, **labels, vocab_size=60, causal=False, norm=norm)
    image = {"image_size": 8, "patch_size": 4, "num_channels": 1, "drop_path": 0.1, "layer_scale": 0.1}
    with META:
        images = NormsmithForImageClassification(NormsmithVisionConfig(**SIZES, **image, norm=norm))
        train(images, pixel_values=torch.rand(2, 1, 8, 8), labels=torch.zeros(2, dtype=torch.long))
        ids, mask = torch.randint(60, (2, 8)), torch.ones(2, 8, dtype=torch.long)
        for cls, wanted in (
            (NormsmithForTokenClassification, ids % 2),
            (NormsmithForSequenceClassification, ids[:, 0]),
        ):
            train(cls(config), input_ids=ids, attention_mask=mask, labels=wanted)
        table = NormsmithForTableRegression(NormsmithTableConfig(**SIZES, num_features=5, norm=norm))
        train(table, features=torch.rand(2, 5), labels=torch.rand(2, 1))
