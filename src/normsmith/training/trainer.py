"""transformers' Trainer with schedules, weight decay by role, a fixed data order and a stop on divergence."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from normsmith.data import Ordered
from normsmith.errors import DivergedError
from normsmith.models import NormsmithForCausalLM
from normsmith.schedules import Controller
from normsmith.schedules.overflow import remedy
from normsmith.training.callback import NormsmithCallback
from normsmith.training.optim import decayed_names, has_unit_weights


class Trainer(transformers.Trainer):
    """Use it as `transformers.Trainer`; `controller` is what `taper_` and the other schedules return.

    What differs: the controller's auxiliary loss is added in training and reported apart from the loss; gates, gains,
    step sizes and biases are never decayed; `Ordered` data (as `PackedWindows`) are read in their own order; a loss
    that is not finite stops the run with `DivergedError` at the next log, and no checkpoint is written from then on,
    nor one whose weights are not finite. With a `teacher`, a causal model that takes the same inputs, the training loss
    is (1 − α)·loss + α·KL(teacher ‖ model), in nats per predicted token, with α = `distill`.
    """

    def __init__(
        self,
        *args: Any,
        controller: Controller | None = None,
        teacher: nn.Module | None = None,
        distill: float = 1.0,
        **kwargs: Any,
    ) -> None:
        self.controller = controller  # before transformers asks how to wrap the model
        super().__init__(*args, **kwargs)
        self.teacher = None if teacher is None else teacher.to(self.args.device).eval().requires_grad_(False)
        self.distill = distill
        # The stock filter would replace a NaN by the mean of the losses before, and asks the device at every step.
        self.args.logging_nan_inf_filter = False
        self.remove_callback(PrinterCallback)
        own = self.model is not None and any(isinstance(m, NormsmithForCausalLM) for m in self.model.modules())
        if self.label_smoother is not None and own:
            # transformers knows by a list of its own classes where the labels are those of the next position.
            self.label_smoother = partial(self.label_smoother, shift_labels=True)
        if controller is not None or (self.model is not None and has_unit_weights(self.model)):
            # After the flow callback, which starts each event, and before those that log or save.
            self.add_callback(NormsmithCallback(controller))
        self._model_loss = torch.tensor(0.0)
        self._auxiliary_sum: Tensor | float = 0.0
        self._auxiliary_batches = 0
        self._first_bad = torch.tensor(-1, device=self.args.device)
        if self.args.world_size > 1 and isinstance(self.train_dataset, Ordered):
            # Else all ranks would draw the same noise, for dropout and sampled gates. Where a sampler shuffles, its
            # order comes from this seed and must be one for all.
            torch.manual_seed(self.args.seed + self.args.process_index)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # Read while transformers' Trainer is constructed, so later is too late for a default of ours.
        if self.args.ddp_broadcast_buffers is None:
            self.args.ddp_broadcast_buffers = False  # each rank collects its own statistics; the controller averages
        stops = self.controller is not None and self.controller.stops_parameters
        if self.args.ddp_find_unused_parameters is None and stops:
            # transformers would say False where activations are recomputed, and the step after the freeze would fail.
            self.args.ddp_find_unused_parameters = True
        return super()._build_accelerator_args(**kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; afterwards the model computes in its own dtype again.

        accelerate puts the autocast of `bf16` and `fp16` around the model's forward and leaves it there, so that all
        that is done with the model after a training would be in half precision unseen.
        """
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.model is not None:
                _without_autocast(self.accelerator.unwrap_model(self.model))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The parameters that weight decay applies to, by role instead of by name."""
        return decayed_names(model)

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int] | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if isinstance(dataset, Ordered):
            return SequentialSampler(dataset)  # shuffled by its own seed, the same for every arm
        return super()._get_train_sampler(train_dataset)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The model's loss plus, in training, the controller's."""
        labels = inputs.get("labels")  # which transformers takes out where it smooths them
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if model.training:
            if self.teacher is not None:
                told = {**inputs, "labels": labels}
                loss = (1 - self.distill) * loss + self.distill * self._divergence(told, outputs, num_items_in_batch)
            steps = self.current_gradient_accumulation_steps
            # Where the loss is divided by the items of the whole accumulated batch, it is a share already.
            shared = self._loss_is_a_share(num_items_in_batch)
            self._model_loss = loss.detach() if shared else loss.detach() / steps
            auxiliary = 0.0 if self.controller is None else self.controller.auxiliary_loss()
            self._auxiliary_batches += 1
            if isinstance(auxiliary, Tensor):
                self._auxiliary_sum = self._auxiliary_sum + auxiliary.detach()
                loss = loss + (auxiliary / steps if shared else auxiliary)
        return (loss, outputs) if return_outputs else loss

    def _divergence(self, inputs: dict[str, Any], outputs: Any, num_items_in_batch: Tensor | int | None) -> Tensor:
        """KL(teacher ‖ model), divided as transformers divides the loss of the same tokens."""
        assert self.teacher is not None
        with torch.no_grad():
            target = self.teacher(**{k: v for k, v in inputs.items() if k != "labels"}).logits[:, :-1]
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[1]
        logs = F.log_softmax(logits[:, :-1].float(), dim=-1)
        each = F.kl_div(logs, F.log_softmax(target.float(), dim=-1), reduction="none", log_target=True).sum(-1)
        kept = inputs["labels"][:, 1:] != -100
        if num_items_in_batch is None:
            return (each * kept).sum() / kept.sum()
        # The count is then of all ranks, whose gradients are averaged; the model's own loss was multiplied alike.
        counted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        ranks = self.accelerator.num_processes // self.get_tp_size()
        return (
            (each * kept).sum()
            / num_items_in_batch
            * (ranks if counted and self.args.average_tokens_across_devices else 1)
        )

    def _loss_is_a_share(self, num_items_in_batch: Tensor | int | None) -> bool:
        """Whether transformers' `training_step` does not divide the loss by the accumulation steps."""
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return counted or self.compute_loss_func is not None

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As in transformers; returns the model's loss without the controller's."""
        total = super().training_step(*args, **kwargs)
        bad = ~torch.isfinite(total) & (self._first_bad < 0)
        self._first_bad = torch.where(bad, self.state.global_step + 1, self._first_bad)
        return self._model_loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, after making sure that the losses so far are finite."""
        self._stop_if_diverged()
        if "loss" in logs and self.controller is not None:
            logs |= self.controller.progress()
            total = torch.as_tensor(self._auxiliary_sum, device=self.args.device).float().reshape(1)
            totals = [float(each) for each in self.accelerator.gather(total)]  # as transformers does with the loss
            logs["auxiliary_loss"] = sum(totals) / len(totals) / max(self._auxiliary_batches, 1)
            self._auxiliary_sum, self._auxiliary_batches = 0.0, 0
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # A finite loss can have a gradient that is not; then the weights are lost before the next loss shows it.
        own = [p.to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
        finite = torch.stack([p.isfinite().all() for p in own]).all()
        bad = ~finite.to(self._first_bad.device) & (self._first_bad < 0)
        self._first_bad = torch.where(bad, self.state.global_step, self._first_bad)
        self._stop_if_diverged()
        super()._save_checkpoint(model, trial)

    def _stop_if_diverged(self) -> None:
        # Every rank must stop, at the same event, also where only one of them has seen it.
        steps = [int(step) for step in self.accelerator.gather(self._first_bad.reshape(1)) if step >= 0]
        if not steps:
            return
        step = min(steps)
        checkpoint = get_last_checkpoint(self.args.output_dir or ".")
        where = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint was written before"
        cause = "" if self.controller is None else self.controller.diagnosis()
        if cause:
            model = self.accelerator.unwrap_model(self.model)
            half = self.args.fp16 or any(p.dtype == torch.float16 for p in model.parameters())
            what = remedy(torch.float16 if half else torch.float32)
            raise DivergedError(f"the loss or the weights are not finite since step {step}: {cause}; {where}; {what}")
        raise DivergedError(
            f"the loss or the weights are not finite since step {step}: {where}; lower the learning rate or lengthen "
            "the warm-up"
        )


def _without_autocast(model: nn.Module) -> None:
    # Not accelerate's own way back, which takes transformers' decorators off the forward too.
    original = vars(model).pop("_original_forward", None)
    if original is None:
        return
    if getattr(original, "__func__", None) is type(model).forward:
        del model.forward  # then the class's is found again; an instance that held it would refer to itself
    else:
        model.forward = original
