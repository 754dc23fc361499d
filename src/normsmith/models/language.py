"""The reference transformer as a Hugging Face causal language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from normsmith.connections import Connection, connections, make_norm
from normsmith.connections.sphere import SphereEntry
from normsmith.errors import InputError
from normsmith.models.blocks import Attention, Block, Rotary
from normsmith.models.config import NormsmithConfig, residual_deviation
from normsmith.models.describe import describe
from normsmith.norms import Norm


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
        r"\.sum_scaled$",
        r"\.sum_power$",
        r"\.batches$",
    ]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            residual = getattr(module, "is_residual_projection", False)
            std = residual_deviation(self.config) if residual else self.config.initializer_range
            init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, Rotary):
            init.copy_(module.inverse_frequency, module.frequencies())
        elif fresh := _fresh(module):
            for name, tensor in [*fresh.named_parameters(recurse=False), *fresh.named_buffers(recurse=False)]:
                init.copy_(getattr(module, name), tensor)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers; the configuration is first made to say what norms the model has now."""
        describe(self)
        super().save_pretrained(*args, **kwargs)


def _fresh(module: nn.Module) -> nn.Module | None:
    """A new module like `module`, with its initial values, for the kinds that normsmith defines."""
    if isinstance(module, Norm):
        return type(module)(module.width, module.config)
    if isinstance(module, Connection):
        return type(module)(module.width, module.index, module.total, "identity", module.config)
    if isinstance(module, SphereEntry):
        return SphereEntry(module.width, learn_radius=module.rho is not None)
    return None


class NormsmithModel(NormsmithPreTrainedModel):
    """Embeddings, entry, blocks, final norm: token ids (batch, time) → (batch, time, d)."""

    sites: ClassVar[dict[str, str]] = {"norm": "final"}
    embed_positions: nn.Embedding | None

    def __init__(self, config: NormsmithConfig) -> None:
        super().__init__(config)
        d = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        learned = config.positions == "learned"
        self.embed_positions = nn.Embedding(config.max_position_embeddings, d) if learned else None
        self.rotary = None if learned else Rotary(d // config.num_attention_heads, config.rope_theta)
        connection = config.connection_spec
        self.entry = connections.get(connection.kind).entry(d, connection)
        self.layers = nn.ModuleList([Block(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = make_norm(cast("dict[str, Any]", config.final_norm), d)
        for name, spec in (config.norm_overrides or {}).items():
            parent, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(parent), leaf, make_norm(spec, d))
        for module in self.modules():
            if isinstance(module, Connection):
                module.bind(self.entry)
            elif isinstance(module, Block):
                for projection in (module.self_attn.o_proj, module.mlp.down_proj):
                    setattr(projection, "is_residual_projection", True)  # noqa: B010 (untyped on purpose)
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
            inputs_embeds = cast("Tensor", self.embed_tokens(input_ids))
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past).unsqueeze(0)
            self._check_length(past, inputs_embeds.shape[1])
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        h = inputs_embeds
        if self.embed_positions is not None:
            h = h + self.embed_positions(position_ids)
        rotation = None if self.rotary is None else self.rotary(position_ids, inputs_embeds.dtype)
        if self.entry is not None:
            h = self.entry(h)
        for block in self.layers:
            h = block(h, rotation=rotation, attention_mask=mask, cache=cache, position_ids=position_ids, **kwargs)
        if self.norm is not None:
            h = self.norm(h)
        return BaseModelOutputWithPast(last_hidden_state=h.to(inputs_embeds.dtype), cache=cache)

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
