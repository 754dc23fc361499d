"""Regression on tables: a token per feature, a class token, the reference trunk."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from normsmith.errors import InputError
from normsmith.models.branch import Fresh
from normsmith.models.classify import ClassToken, Standardise, pool
from normsmith.models.config import NormsmithConfig
from normsmith.models.language import NormsmithModel, NormsmithPreTrainedModel, task_head


@strict
class NormsmithTableConfig(NormsmithConfig):
    """Configuration of `NormsmithForTableRegression`: that of the trunk, and the table.

    Args:
        num_features: columns that are read.
        num_targets: columns that are predicted.
    """

    model_type: ClassVar[str] = "normsmith_table"
    reads_tokens: ClassVar[bool] = False

    num_features: int = 8
    num_targets: int = 1
    positions: str = "none"
    causal: bool = False
    pooling: str = "cls"

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("num_features", "num_targets"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        super().__post_init__(**kwargs)


class FeatureTokens(Fresh):
    """x_j → x_j·w_j + b_j: a token of its own for every feature, (batch, F) → (batch, F, d).

    The numerical tokenizer of the FT-Transformer (arXiv 2106.11959); w and b start uniform in ±1/√d.
    """

    biases_by_row = ("biases",)

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(features, width))
        self.biases = nn.Parameter(torch.empty(features, width))
        self.initialise(0.0)

    def initialise(self, deviation: float) -> None:
        """Uniform, whatever the model's deviation: an embedding that the feature multiplies must not start near 0."""
        bound = self.weights.shape[1] ** -0.5
        init.uniform_(self.weights, -bound, bound)
        init.uniform_(self.biases, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, F) → (batch, F, d)."""
        return x[..., None] * self.weights + self.biases


class NormsmithForTableRegression(NormsmithPreTrainedModel):
    """Feature tokens, class token, trunk, linear head; features and predictions are in the table's own units.

    Both are standardised inside: with `mean` and `scale` of the training rows, the head predicts
    (target − mean) / scale, and the loss is the mean squared error of that.
    """

    config_class = NormsmithTableConfig
    config: NormsmithTableConfig
    main_input_name = "features"
    accepts_loss_kwargs = False

    def __init__(self, config: NormsmithTableConfig) -> None:
        super().__init__(config)
        self.standardise = Standardise(config.num_features)
        self.target = Standardise(config.num_targets)
        self.tokens = FeatureTokens(config.num_features, config.hidden_size)
        self.class_token = ClassToken(config.hidden_size)
        self.model = NormsmithModel(config)
        self.regressor = task_head(config.hidden_size, config.num_targets)
        self.post_init()

    @can_return_tuple
    def forward(self, features: Tensor, labels: Tensor | None = None, **kwargs: Any) -> SequenceClassifierOutput:
        """Features (batch, F) in the table's units → `logits`, the predictions (batch, targets), in those too.

        With `labels`, (batch, targets) or for one target (batch,), also their mean squared error, standardised.
        """
        if features.shape[-1] != self.config.num_features:
            raise InputError(
                f"the rows have {features.shape[-1]} features, this model takes {self.config.num_features}"
            )
        x = self.standardise(features).to(self.tokens.weights.dtype)
        outputs = self.model(inputs_embeds=self.class_token(self.tokens(x)), use_cache=False, **kwargs)
        predicted = self.regressor(pool(outputs.last_hidden_state, None, self.config.pooling))
        if labels is not None:
            labels = labels[:, None] if labels.ndim == 1 and self.config.num_targets == 1 else labels
            if labels.shape != predicted.shape:  # broadcast, they would be compared with other rows' predictions
                raise InputError(f"the labels are {list(labels.shape)}, the predictions {list(predicted.shape)}")
        loss = None if labels is None else F.mse_loss(predicted.float(), self.target(labels).float())
        return SequenceClassifierOutput(
            loss=loss,
            logits=self.target.invert(predicted.float()),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
