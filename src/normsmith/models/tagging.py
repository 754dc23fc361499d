"""One label per token on the reference trunk."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from normsmith.models.classify import refuse_blank
from normsmith.models.config import NormsmithConfig
from normsmith.models.language import NormsmithModel, NormsmithPreTrainedModel, task_head


class NormsmithForTokenClassification(NormsmithPreTrainedModel):
    """The trunk and a linear head on every token."""

    def __init__(self, config: NormsmithConfig) -> None:
        super().__init__(config)
        self.model = NormsmithModel(config)
        self.classifier = task_head(config.hidden_size, len(config.id2label or {}))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Token ids (batch, time), padded on the right where `attention_mask` is 0, → logits (batch, time, labels).

        With `labels` (batch, time), −100 where a token has none, also the cross-entropy in nats: the mean over the
        labelled tokens, or their sum divided by `num_items_in_batch`.
        """
        refuse_blank(attention_mask)
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, use_cache=False, **kwargs
        )
        logits = self.classifier(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            how = "mean" if num_items_in_batch is None else "sum"
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction=how)
            if num_items_in_batch is not None:
                loss = loss / num_items_in_batch
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
