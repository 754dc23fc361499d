"""The Trainer: the same numbers as a loop written by hand, the same data for every arm, and no run after a NaN."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters
from transformers.trainer_utils import get_last_checkpoint

from normsmith.connections import Connection
from normsmith.errors import DivergedError
from normsmith.models import NormsmithForCausalLM
from normsmith.schedules import TaperConfig
from normsmith.surgery import taper_
from normsmith.training import NormsmithCallback, Trainer, parameter_groups
from tests.training.runs import STEPS, TAPER, At, arguments, logged, small, tapered, windows


def by_hand(model: NormsmithForCausalLM, micro: int) -> list[dict[str, float]]:
    """TrainingConfig's defaults as a plain PyTorch loop; `micro` batches of 4 per step."""
    controller = taper_(model, TAPER, steps=STEPS)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-2, betas=(0.9, 0.95))
    data, read, rows = windows(128), 0, []
    model.train()
    for step in range(STEPS):
        # transformers' cosine_with_min_lr: 2 steps of linear warm-up, then a cosine down to a tenth
        progress = (step - 2) / (STEPS - 2)
        rate = step / 2 if step < 2 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * rate
        row = {"loss": 0.0, "auxiliary_loss": 0.0}
        for _ in range(micro):
            ids = torch.stack([data[i]["input_ids"] for i in range(read, read + 4)])
            read += 4
            loss = model(ids, labels=ids).loss
            auxiliary = controller.auxiliary_loss()
            ((loss + auxiliary) / micro).backward()
            row["loss"] += loss.item() / micro
            row["auxiliary_loss"] += float(torch.as_tensor(auxiliary).detach()) / micro
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
        rows.append(row | {"gate": TAPER.gate(step + 1, STEPS)})
    return rows


@pytest.mark.parametrize("micro", [1, 3])
def test_the_trainer_equals_a_loop_by_hand(micro: int, tmp_path: Path) -> None:
    model, twin = small(), small()
    controller = taper_(model, TAPER)
    args = arguments(tmp_path, gradient_accumulation=micro)
    trainer = Trainer(model, args, train_dataset=windows(128), controller=controller)
    trainer.train()
    rows = by_hand(twin, micro)
    # The losses are summed in another order and AdamW is fused, which is rounding only.
    for name in ("loss", "auxiliary_loss", "gate"):
        values = logged(trainer, name)
        assert list(values) == list(range(1, STEPS + 1))
        assert list(values.values()) == pytest.approx([row[name] for row in rows], rel=2e-4, abs=1e-7), name
    auxiliary = list(logged(trainer, "auxiliary_loss").values())
    assert auxiliary[:3] == [0, 0, 0], "before the taper begins"
    assert min(auxiliary[3:]) > 0
    assert logged(trainer, "loss")[8] != pytest.approx(rows[7]["loss"] + rows[7]["auxiliary_loss"], rel=1e-3)
    assert all(n.gate == 0 and n.gate_eval == 0 for n in tapered(model))
    for one, other in zip(tapered(model), tapered(twin), strict=True):
        torch.testing.assert_close(one.scale, other.scale, rtol=1e-4, atol=0)
    assert "scale_target" in trainer.state.log_history[4]


def test_smoothed_labels_are_those_of_the_next_token(tmp_path: Path) -> None:
    losses: list[float] = []
    for number, smoothing in enumerate((0.0, 1e-9)):
        torch.manual_seed(0)
        options = arguments(tmp_path / str(number), max_steps=1)
        options.label_smoothing_factor = smoothing
        model = small()
        trainer = Trainer(model, options, train_dataset=windows(4), teacher=small())
        losses.append(trainer.evaluate(windows(4))["eval_loss"])
        trainer.train()  # with a teacher, who needs the labels too
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_logs_further_apart_are_means_over_the_steps_between(tmp_path: Path) -> None:
    every: dict[int, dict[str, dict[int, float]]] = {}
    for log_every in (1, 4):
        model = small()
        trainer = Trainer(
            model, arguments(tmp_path, log_every=log_every), train_dataset=windows(), controller=taper_(model, TAPER)
        )
        trainer.train()
        every[log_every] = {name: logged(trainer, name) for name in ("loss", "auxiliary_loss")}
    for name, single in every[1].items():
        for step, mean in every[4][name].items():
            assert mean == pytest.approx(sum(single[step - i] for i in range(4)) / 4, rel=1e-6), name


def plain_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss function of the user's: it divides by the items of the accumulated batch, as transformers asks."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("kind", ["model divides by all items", "model ignores the items", "compute_loss_func"])
def test_two_batches_of_four_train_like_one_of_eight(kind: str, tmp_path: Path) -> None:
    runs = []
    for batch, accumulate in ((8, 1), (4, 2)):
        model = small()
        if kind != "model divides by all items":
            model.accepts_loss_kwargs = False  # pyright: ignore[reportAttributeAccessIssue]
        controller = taper_(model, TAPER)
        args = arguments(tmp_path, batch_size=batch, gradient_accumulation=accumulate, learning_rate=0.5)
        args.optim = "sgd"  # AdamW would turn rounding of near-zero gradients into whole steps
        function = plain_mean if kind == "compute_loss_func" else None
        trainer = Trainer(model, args, train_dataset=windows(), controller=controller, compute_loss_func=function)
        trainer.train()
        runs.append((model, controller, trainer))
    (one, controller, trainer), (other, second, accumulated) = runs
    for name in ("loss", "auxiliary_loss", "gate", "scale_target"):
        assert logged(trainer, name) == pytest.approx(logged(accumulated, name), rel=1e-4), name
    torch.testing.assert_close(second.moments, controller.moments, rtol=1e-4, atol=0)
    torch.testing.assert_close(second.target, controller.target, rtol=1e-4, atol=0)
    start = small().state_dict()
    for name, p in other.named_parameters():
        torch.testing.assert_close(p, one.get_parameter(name), rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    moved = (other.model.embed_tokens.weight - start["model.embed_tokens.weight"]).abs().max()
    assert moved > 0.05, "the run must move the weights by more than the tolerance"


def test_the_callback_alone_serves_a_plain_trainer(tmp_path: Path) -> None:
    model = small()
    controller = taper_(model, TaperConfig(warmup=0.4, momentum=0.2, scale_loss=0))
    trainer = transformers.Trainer(
        model,
        arguments(tmp_path, save_every=5),
        train_dataset=windows(),
        callbacks=[NormsmithCallback(controller)],
    )
    trainer.train()
    assert controller.completed == controller.steps == STEPS
    assert all(n.gate == 0 for n in tapered(model))
    state = json.loads((tmp_path / "checkpoint-5" / "trainer_state.json").read_text())
    saved = state["stateful_callbacks"]["NormsmithCallback"]["attributes"]["controller_state"]
    assert (saved["completed"], saved["steps"]) == (5, STEPS)
    assert saved["config"] == controller.config.to_dict()
    torch.testing.assert_close(torch.tensor(saved["moments"]), controller.moments)  # frozen since step 3

    again = small(seed=9)
    fresh = taper_(again, controller.config)
    transformers.Trainer(
        again, arguments(tmp_path, save_every=5), train_dataset=windows(), callbacks=[NormsmithCallback(fresh)]
    ).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert fresh.state_dict() == controller.state_dict()
    assert all(n.gate == 0 for n in tapered(again))


def seen_by(model: NormsmithForCausalLM, trainer: Trainer) -> Tensor:
    ids: list[Tensor] = []
    model.register_forward_pre_hook(lambda m, args, kwargs: ids.append(kwargs["input_ids"]), with_kwargs=True)
    trainer.train()
    return torch.cat(ids)


def test_every_arm_reads_the_same_windows_in_their_order(tmp_path: Path) -> None:
    pre, sphere = small(), small("gpt", seed=3, connection="sphere", num_hidden_layers=1)
    controller = taper_(pre, TAPER)
    first = seen_by(pre, Trainer(pre, arguments(tmp_path), train_dataset=windows(32), controller=controller))
    torch.manual_seed(123)
    args = arguments(tmp_path, seed=77, batch_size=2, gradient_accumulation=2)
    second = seen_by(sphere, Trainer(sphere, args, train_dataset=windows(32)))
    expected = torch.stack([windows(32)[i]["input_ids"] for i in range(32)])
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    unshuffled = torch.stack([windows(32, seed=None)[i]["input_ids"] for i in range(32)])
    assert not torch.equal(first, unshuffled)


@torch.no_grad()
def poison(model: NormsmithForCausalLM) -> None:
    model.model.layers[1].mlp.down_proj.weight[0, 0] = math.inf


@pytest.mark.parametrize("log_every", [1, 3, 100])
def test_divergence_names_the_step_and_the_last_good_checkpoint(log_every: int, tmp_path: Path) -> None:
    model = small()
    trainer = Trainer(
        model,
        arguments(tmp_path, log_every=log_every, save_every=2),
        train_dataset=windows(),
        controller=taper_(model, TAPER),
        callbacks=[At(5, lambda: poison(model))],
    )
    with pytest.raises(
        DivergedError,
        match=r"since step 5: the input of the final norm was .*; the last good checkpoint is .*checkpoint-4;",
    ):
        trainer.train()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert trainer.state.global_step == (5 if log_every == 1 else 6)


def test_divergence_without_checkpoints_is_found_at_the_end_at_the_latest(tmp_path: Path) -> None:
    model = small()
    callback = At(7, lambda: poison(model))
    trainer = Trainer(model, arguments(tmp_path, log_every=100), train_dataset=windows(), callbacks=[callback])
    with pytest.raises(DivergedError, match="since step 7: no checkpoint was written before"):
        trainer.train()


def test_one_bad_micro_batch_is_enough(tmp_path: Path) -> None:
    model = small()
    calls: list[int] = []

    def hook(module: Any, args: Any, output: Any) -> Any:
        calls.append(1)
        if len(calls) == 7:  # the first of the two micro-batches of step 4
            output["loss"] = output["loss"] * math.nan
        return output

    model.register_forward_hook(hook)
    args = arguments(tmp_path, gradient_accumulation=2, log_every=4)
    with pytest.raises(DivergedError, match="since step 4: no checkpoint"):
        Trainer(model, args, train_dataset=windows()).train()


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    # The loss of step 4 is finite and its gradient is not: only the weights after it show the damage.
    model = small()
    down = model.model.layers[0].mlp.down_proj.weight
    trainer = Trainer(
        model,
        arguments(tmp_path, log_every=100, save_every=2),
        train_dataset=windows(),
        callbacks=[At(4, lambda: down.register_hook(lambda grad: grad * math.nan))],
    )
    with pytest.raises(DivergedError, match=r"since step 4: the last good checkpoint is .*checkpoint-2;"):
        trainer.train()
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("connection", ["proj", "cay", "geo"])
def test_bfloat16_keeps_stream_and_parameters_in_float32(connection: str, tmp_path: Path) -> None:
    model = small(connection=connection)
    streams: list[torch.dtype] = []
    products: list[torch.dtype] = []
    for c in (m for m in model.modules() if isinstance(m, Connection)):
        merge = c.merge
        c.merge = lambda h, out, merge=merge: (streams.append(h.dtype), merge(h, out))[1]  # pyright: ignore
    model.model.norm.register_forward_pre_hook(lambda m, a: streams.append(a[0].dtype))
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda m, a, out: products.append(out.dtype))
    trainer = Trainer(model, arguments(tmp_path, max_steps=3, bf16=True), train_dataset=windows())
    trainer.train()
    assert products == [torch.bfloat16] * 3, "the run is one in bfloat16"
    assert streams == [torch.float32] * (3 * 5)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {t.dtype for s in trainer.optimizer.state.values() for t in s.values()} == {torch.float32}


def test_after_a_training_in_bfloat16_the_model_computes_in_float32(tmp_path: Path) -> None:
    model = small()
    ids = torch.randint(256, (2, 16))
    trainer = Trainer(model, arguments(tmp_path, bf16=True), train_dataset=windows(), eval_dataset=windows(8))
    for _ in range(2):
        trainer.train()
        fresh = small()
        fresh.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.equal(model.eval()(input_ids=ids).logits, fresh.eval()(input_ids=ids).logits)
        assert "forward" not in vars(model)
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_a_compiled_taper_is_one_graph(tmp_path: Path) -> None:
    torch.compiler.reset()
    counters.clear()
    losses: list[dict[int, float]] = []
    for compiled in (True, False):
        model = small()
        args = arguments(tmp_path, compile=compiled)
        if compiled:
            args.torch_compile_backend = "eager"  # counts dynamo's graphs; inductor would only add its own seconds
        trainer = Trainer(model, args, train_dataset=windows(), controller=taper_(model, TAPER))
        trainer.train()
        assert counters["stats"]["unique_graphs"] == 1, "one for eight steps, none for the run that is not compiled"
        assert all(n.gate == 0 for n in tapered(model))
        losses.append(logged(trainer, "loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
