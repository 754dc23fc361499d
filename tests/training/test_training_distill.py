"""Distillation: the loss is the one that is written down, and a model learns nothing from itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.training import Trainer

IDS = torch.randint(60, (8, 12), generator=torch.Generator().manual_seed(3))
ROWS = [{"input_ids": row, "labels": row} for row in IDS]


def small() -> NormsmithForCausalLM:
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "initializer_range": 0.3}
    return NormsmithForCausalLM(preset_config("llama", **sizes))


def trainer(model: Any, folder: Path, **options: Any) -> Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        report_to=[],
        use_cpu=True,
        per_device_train_batch_size=4,
        save_strategy="no",
    )
    return Trainer(model, arguments, train_dataset=ROWS, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("items", [None, 44])
def test_the_loss_is_the_mixture(alpha: float, items: int | None, tmp_path: Path) -> None:
    model, teacher = small().train(), small()
    run = trainer(model, tmp_path, teacher=teacher, distill=alpha)
    run.current_gradient_accumulation_steps = 1
    labels = IDS.clone()
    labels[0, :4] = -100
    given = None if items is None else torch.tensor(items)
    loss = run.compute_loss(model, {"input_ids": IDS, "labels": labels}, num_items_in_batch=given)
    with torch.no_grad():
        mine = model(IDS).logits[:, :-1].double().log_softmax(-1)
        theirs = teacher(IDS).logits[:, :-1].double().log_softmax(-1)
    kept = labels[:, 1:] != -100
    count = kept.sum() if items is None else items
    divergence = ((theirs.exp() * (theirs - mine)).sum(-1) * kept).sum() / count
    entropy = F.cross_entropy(mine.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum") / count
    assert float(loss.detach()) == pytest.approx(float((1 - alpha) * entropy + alpha * divergence), rel=1e-5)


def test_a_model_learns_nothing_from_itself_and_everything_from_another(tmp_path: Path) -> None:
    model = small()
    same = copy.deepcopy(model)
    trainer(same, tmp_path, teacher=copy.deepcopy(model), distill=1.0).train()
    for (name, a), b in zip(model.named_parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=0, msg=name)
    teacher = small()
    before = {name: p.clone() for name, p in teacher.named_parameters()}
    trainer(model, tmp_path, teacher=teacher, distill=1.0).train()
    assert all(torch.equal(before[name], p) for name, p in teacher.named_parameters())
    assert not any(p.requires_grad for p in teacher.parameters())


def test_evaluation_is_without_the_teacher(tmp_path: Path) -> None:
    model = small()
    plain = trainer(copy.deepcopy(model), tmp_path, eval_dataset=ROWS).evaluate()["eval_loss"]
    assert trainer(model, tmp_path, eval_dataset=ROWS, teacher=small()).evaluate()["eval_loss"] == plain
