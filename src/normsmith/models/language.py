"""The reference transformer as a Hugging Face causal language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeGuard, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from normsmith.connections import Connection, connections, make_norm
from normsmith.connections.ngpt import Scale
from normsmith.connections.sphere import SphereEntry
from normsmith.errors import InputError
from normsmith.models.blocks import Attention, Block, Rotary, projection
from normsmith.models.branch import Fresh
from normsmith.models.config import NormsmithConfig, initial_deviations
from normsmith.models.describe import describe
from normsmith.norms import Norm
from normsmith.norms.autonorm import STATE as GATE_STATE
from normsmith.norms.fakeln import FAKE_STATE
from normsmith.ops.statistics import widen


class NormsmithPreTrainedModel(PreTrainedModel):
    """What every model on the reference trunk shares: initialisation, capabilities, truthful saving."""

    config_class = NormsmithConfig
    config: NormsmithConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar[dict[str, Any]] = {"hidden_states": Block, "attentions": Attention}
    # The gate, c and their moments are state of a schedule: half precision would round the taper itself.
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = [
        r"\.gate$",
        r"\.gate_eval$",
        r"\.scale$",
        r"\.mean$",  # of a table's units, which half precision may not hold
        r"\.sum_scaled$",
        r"\.sum_power$",
        r"\.batches$",
        *(rf"\.{name}$" for name in (*GATE_STATE, *FAKE_STATE) if name != "batches"),
    ]

    @property
    def _family(self) -> type[Connection]:
        return connections.get(self.config.connection_spec.kind)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):
            role = getattr(module, "role", "")
            std = initial_deviations(self.config).get(role, self.config.initializer_range)
            init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, Rotary):
            init.copy_(module.inverse_frequency, module.frequencies())
        elif isinstance(module, Fresh):
            module.initialise(self.config.initializer_range)
        elif fresh := _fresh(module):
            for name, tensor in [*fresh.named_parameters(recurse=False), *fresh.named_buffers(recurse=False)]:
                init.copy_(getattr(module, name), tensor)
        if _has_unit_length(module) and self._family.unit_weights:
            init.copy_(module.weight, self._unit_weight(module))

    @torch.no_grad()
    def normalize_weights_(self) -> None:
        """Give all matrices and embeddings unit length along the stream's axis, if the connection asks so. In place.

        All but the head of a task: the stream has length 1, so its outputs could not leave [−1, 1], and only the head
        of a language model has a scale of its own.

        Call it after each optimiser step of an `ngpt` model; for all other families it does nothing. Models are made
        with such weights, and `normsmith.Trainer` and `NormsmithCallback` call it by themselves.
        """
        if self._family.unit_weights:
            for module in self.modules():
                if _has_unit_length(module):
                    module.weight.copy_(self._unit_weight(module))

    def _unit_weight(self, module: nn.Linear | nn.Embedding) -> Tensor:
        # W is (out, in): o and down write the stream with their outputs, everything else reads it with its inputs.
        axis = 0 if getattr(module, "role", "") in ("o", "down") else 1
        wide = widen(module.weight)
        return wide / wide.norm(dim=axis, keepdim=True).clamp_min(1e-12)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers; the configuration is first made to say what norms the model has now."""
        describe(self)
        super().save_pretrained(*args, **kwargs)


def task_head(width: int, outputs: int) -> nn.Linear:
    """A linear layer from the stream to what a task asks for; its rows may have any length in every model."""
    return projection("head", width, outputs, bias=True)


def _has_unit_length(module: nn.Module) -> TypeGuard[nn.Linear | nn.Embedding]:
    return isinstance(module, nn.Linear | nn.Embedding) and getattr(module, "role", "") != "head"


def _fresh(module: nn.Module) -> nn.Module | None:
    """A new module like `module`, with its initial values, for the kinds that normsmith defines."""
    if isinstance(module, Norm):
        return type(module)(module.width, module.config)
    return cast("nn.Module", module.fresh()) if isinstance(module, Connection | Scale | SphereEntry) else None


class NormsmithModel(NormsmithPreTrainedModel):
    """Embeddings, entry, blocks, final norm: token ids (batch, time) → (batch, time, d).

    Where `config.causal` is off, every token sees every valid one, and norms that pool over tokens (those with an
    attribute `token_mask`) are told which are valid.
    """

    sites: ClassVar[dict[str, str]] = {"norm": "final", "entry": "embedding"}
    embed_tokens: nn.Embedding | None
    embed_positions: nn.Embedding | None

    def __init__(self, config: NormsmithConfig) -> None:
        super().__init__(config)
        d = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, d) if type(config).reads_tokens else None
        learned, rope = (config.positions == kind for kind in ("learned", "rope"))
        self.embed_positions = nn.Embedding(config.max_position_embeddings, d) if learned else None
        self.rotary = Rotary(d // config.num_attention_heads, config.rope_theta) if rope else None
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None
        connection = config.connection_spec
        family = connections.get(connection.kind)
        # √d at the start, stored as it is; on the sum of token and position embeddings (arXiv 2512.10938).
        self.embedding_scale = Scale((), d**0.5, d**0.5) if config.embedding_scale else None
        self.wide_stream = family.wide(connection)
        self.entry = family.entry(d, connection, config.norm_spec)
        self.layers = nn.ModuleList([Block(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = make_norm(cast("dict[str, Any]", config.final_norm), d)
        for name, spec in (config.norm_overrides or {}).items():
            parent, _, leaf = name.rpartition(".")
            owner = self.get_submodule(parent)
            setattr(owner, leaf, make_norm(spec, getattr(getattr(owner, leaf), "width", d)))
        for module in self.modules():
            if isinstance(module, Connection):
                module.bind(self.entry)
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Arguments as in every transformers decoder; exactly one of `input_ids` and `inputs_embeds`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = cast("Tensor", cast("nn.Embedding", self.embed_tokens)(input_ids))
        if use_cache is None:
            use_cache = self.config.use_cache and self.config.causal and not self.training
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        given = position_ids  # packed sequences show in these; looking for them in our own would wait for the device
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past).unsqueeze(0)
            self._check_length(past, inputs_embeds.shape[1])
        causal = self.config.causal
        # Whether a mask masks nothing is worth a look only where that does not wait for the device.
        here: dict[str, Any] = {} if causal else {"allow_is_bidirectional_skip": inputs_embeds.device.type == "cpu"}
        mask = (create_causal_mask if causal else create_bidirectional_mask)(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=given,
            **here,
        )
        if not causal:
            self._tell_norms(attention_mask)
        h = inputs_embeds
        if self.embed_positions is not None:
            h = h + self.embed_positions(position_ids)
        rotation = None if self.rotary is None else self.rotary(position_ids, inputs_embeds.dtype)
        if self.dropout is not None:
            h = self.dropout(h)
        if self.embedding_scale is not None:
            h = self.embedding_scale(h)
        if self.wide_stream and h.dtype != torch.float64:
            h = h.float()
        if self.entry is not None:
            h = self.entry(h)
        for block in self.layers:
            h = block(h, rotation=rotation, attention_mask=mask, cache=cache, position_ids=position_ids, **kwargs)
        if self.norm is not None:
            h = self.norm(h)
        return BaseModelOutputWithPast(last_hidden_state=h.to(inputs_embeds.dtype), cache=cache)

    def _tell_norms(self, attention_mask: Tensor | None) -> None:
        for module in self.modules():  # looked for anew: norms can be swapped at any time
            if isinstance(module, Norm) and hasattr(module, "token_mask"):
                setattr(module, "token_mask", attention_mask)  # noqa: B010 (not every norm has it)

    def _check_length(self, past: int | Tensor, new: int) -> None:
        # A static cache counts in a tensor; asking it would stall an accelerator, and its size is checked at creation.
        limit = self.config.max_position_embeddings
        if self.embed_positions is not None and isinstance(past, int) and past + new > limit:
            raise InputError(
                f"the sequence has {past + new} tokens, but the model learned positions for {limit} only "
                "(max_position_embeddings)"
            )


class NormsmithForCausalLM(NormsmithPreTrainedModel, GenerationMixin):
    """The reference transformer with a language-modelling head; its norm and connection are configuration.

    >>> model = NormsmithForCausalLM(preset_config("llama", hidden_size=64, norm="dyt"))
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: NormsmithConfig) -> None:
        super().__init__(config)
        self.model = NormsmithModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.logit_scale = self._family.logit_scale(config.vocab_size, config.hidden_size)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")  # as in transformers' own models
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (batch, time, vocabulary), and the mean cross-entropy in nats per token where `labels` are given.

        `labels` are the input ids themselves (the shift happens here); positions with −100 do not count.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep, :])
        if self.logit_scale is not None:
            logits = self.logit_scale(logits)
        loss = None
        if labels is not None:
            loss_of = cast("Callable[..., Tensor]", self.loss_function)
            loss = loss_of(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
