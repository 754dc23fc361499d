"""Classification of images and of token sequences on the reference trunk."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_outputs import ImageClassifierOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from normsmith.errors import InputError
from normsmith.models.branch import Fresh
from normsmith.models.config import NormsmithConfig
from normsmith.models.language import NormsmithModel, NormsmithPreTrainedModel, task_head
from normsmith.norms.base import Stateful


@strict
class NormsmithVisionConfig(NormsmithConfig):
    """Configuration of `NormsmithForImageClassification`: that of the trunk, and the image.

    Args:
        image_size: height and width in pixels; one number for both.
        patch_size: height and width of a patch; divides both.
        num_channels: 1 for grey, 3 for colour.
    """

    model_type: ClassVar[str] = "normsmith_vision"
    reads_tokens: ClassVar[bool] = False

    image_size: int | list[int] = 32
    patch_size: int = 4
    num_channels: int = 3
    positions: str = "learned"
    causal: bool = False
    pooling: str = "cls"

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.image_size, int):
            self.image_size = [self.image_size, self.image_size]
        sizes = (*self.image_size, self.patch_size, self.num_channels)
        if len(self.image_size) != 2 or min(sizes) < 1:
            raise InputError(
                f"image_size={self.image_size}, patch_size={self.patch_size}, num_channels={self.num_channels}: write "
                "height and width (or one number for both), and at least 1 for each"
            )
        height, width = self.image_size
        if height % self.patch_size or width % self.patch_size:
            fitting = [n for n in range(1, min(height, width) + 1) if not (height % n or width % n)]
            raise InputError(
                f"patch_size={self.patch_size} does not divide images of {height}×{width} pixels; "
                f"write one of {', '.join(map(str, fitting))}"
            )
        self.max_position_embeddings = 1 + height * width // self.patch_size**2
        super().__post_init__(**kwargs)


class Standardise(Stateful):
    """(x − mean) / scale with fixed float32 buffers (n,) for `n` channels or columns, saved with the model.

    The model then takes what the data hold, and nobody has to remember how they were scaled. Results are float32
    whatever the model's dtype: float16 ends at 65,504, and a table's units do not.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))

    def set_(self, mean: Any, scale: Any) -> None:
        """Set both; a scale of 0 (a constant column) counts as 1."""
        scale = torch.as_tensor(scale, dtype=torch.float32)
        self.mean.copy_(torch.as_tensor(mean, dtype=torch.float32))
        self.scale.copy_(torch.where(scale == 0, torch.ones_like(scale), scale))

    def forward(self, x: Tensor) -> Tensor:
        """(…, n) → (…, n)."""
        return (x - self.mean) / self.scale

    def invert(self, x: Tensor) -> Tensor:
        """x·scale + mean."""
        return x * self.scale + self.mean


class ClassToken(Fresh):
    """One learned token put before the others: (batch, time, d) → (batch, 1 + time, d)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(width))

    def initialise(self, deviation: float) -> None:
        """Normal with the model's deviation."""
        init.normal_(self.value, mean=0.0, std=deviation)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, d) → (batch, 1 + time, d)."""
        return torch.cat((self.value.to(x.dtype).expand(x.shape[0], 1, -1), x), dim=1)


def pool(h: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """(batch, time, d) → (batch, d): the first token for `cls`, the mean over valid tokens for `mean`.

    `mask` (batch, time) is 1 for valid tokens; a row without any gives zeros.
    """
    if how == "cls":
        return h[:, 0]
    if mask is None:
        return h.mean(1)
    kept = mask[..., None].to(h.dtype)
    return (h * kept).sum(1) / kept.sum(1).clamp_min(1)


def refuse_blank(mask: Tensor | None) -> None:
    """Raise for a sample that is padding alone, where looking waits for no device: on the CPU, in eager code.

    Args:
        mask: (batch, time), 0 for padding.

    Raises:
        InputError: which row has no token.
    """
    if mask is None or mask.ndim != 2 or mask.device.type != "cpu" or torch.compiler.is_compiling():
        return
    blank = (mask == 0).all(1)
    if blank.any():
        raise InputError(
            f"row {int(blank.int().argmax())} of the batch is padding alone: its attention_mask has no 1; "
            "leave empty texts out"
        )


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats, float32; labels are classes (batch,) or probabilities (batch, classes)."""
    return F.cross_entropy(logits.float(), labels)


class NormsmithForImageClassification(NormsmithPreTrainedModel):
    """A small vision transformer: convolutional patches, class token, learned positions, trunk, linear head.

    ViT-Lite (arXiv 2104.05704) with the norms and connections of the trunk. It takes pixels in [0, 1].
    """

    config_class = NormsmithVisionConfig
    config: NormsmithVisionConfig
    main_input_name = "pixel_values"
    accepts_loss_kwargs = False  # the loss is a mean over the images of one batch

    def __init__(self, config: NormsmithVisionConfig) -> None:
        super().__init__(config)
        self.standardise = Standardise(config.num_channels)
        self.patches = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.class_token = ClassToken(config.hidden_size)
        self.model = NormsmithModel(config)
        self.classifier = task_head(config.hidden_size, len(config.id2label or {}))
        self.post_init()

    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any) -> ImageClassifierOutput:
        """Pixels in [0, 1], (batch, channels, height, width), → logits (batch, classes).

        With `labels`, classes (batch,) or probabilities (batch, classes), also the mean cross-entropy in nats.

        Raises:
            InputError: images of another size or number of channels than the model was made for.
        """
        expected = [self.config.num_channels, *self._size()]
        if list(pixel_values.shape[1:]) != expected:
            raise InputError(
                f"the images have the shape {list(pixel_values.shape[1:])} (channels, height, width), "
                f"this model takes {expected}"
            )
        x = self.standardise(pixel_values.movedim(1, -1)).movedim(-1, 1).to(self.patches.weight.dtype)
        tokens = self.class_token(self.patches(x).flatten(2).transpose(1, 2))
        outputs = self.model(inputs_embeds=tokens, use_cache=False, **kwargs)
        logits = self.classifier(pool(outputs.last_hidden_state, None, self.config.pooling))
        return ImageClassifierOutput(
            loss=None if labels is None else class_loss(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _size(self) -> list[int]:
        size = self.config.image_size
        return [size, size] if isinstance(size, int) else size


class NormsmithForSequenceClassification(NormsmithPreTrainedModel):
    """The trunk, a pooled token and a linear head; every token sees all valid ones unless `config.causal` is on."""

    accepts_loss_kwargs = False

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
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Token ids (batch, time), padded on the right where `attention_mask` is 0, → logits (batch, classes).

        With `labels`, classes (batch,) or probabilities (batch, classes), also the mean cross-entropy in nats.
        """
        refuse_blank(attention_mask)
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, use_cache=False, **kwargs
        )
        logits = self.classifier(pool(outputs.last_hidden_state, attention_mask, self.config.pooling))
        return SequenceClassifierOutput(
            loss=None if labels is None else class_loss(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
