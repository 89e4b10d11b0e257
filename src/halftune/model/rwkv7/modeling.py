"""RWKV-7 for causal language modelling, with flash-linear-attention's parameter names and arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from halftune.core.errors import ModelError
from halftune.model.rwkv7.configuration import RWKV7Config
from halftune.model.rwkv7.initialization import init_channel_mixing, init_embedding, init_head, init_time_mixing
from halftune.model.rwkv7.mixing import ChannelMixing, TimeMixing
from halftune.model.rwkv7.row_context import RecurrentCache, RowContext, describe_row


class RWKV7Block(GradientCheckpointingLayer):
    """One layer."""

    def __init__(self, config: RWKV7Config, layer: int) -> None:
        super().__init__()
        shape = config.shape
        if config.norm_first and layer == 0:
            self.pre_norm = _norm(config)
        self.attn_norm = _norm(config)
        self.attn = TimeMixing(shape, layer, norm_eps=config.norm_eps, fused_norm=config.fuse_norm)
        self.ffn_norm = _norm(config)
        self.ffn = ChannelMixing(shape, layer, config.hidden_act)

    def forward(
        self, x_BTD: torch.Tensor, first_BTE: torch.Tensor | None, row: RowContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states after this layer, and the first layer's values."""
        if hasattr(self, "pre_norm"):
            x_BTD = self.pre_norm(x_BTD)
        mixed_BTD, values_BTE = self.attn(self.attn_norm(x_BTD), first_BTE, row)
        x_BTD = x_BTD + mixed_BTD
        return x_BTD + self.ffn(self.ffn_norm(x_BTD), row), values_BTE


class RWKV7PreTrainedModel(PreTrainedModel):
    """Base class with transformers' settings of the architecture."""

    config: RWKV7Config
    config_class = RWKV7Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RWKV7Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True
    _input_embed_layer = "embeddings"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        layers = self.config.num_hidden_layers
        if isinstance(module, TimeMixing):
            init_time_mixing(module, layers)
        elif isinstance(module, ChannelMixing):
            init_channel_mixing(module, layers)
        elif isinstance(module, nn.Embedding):
            init_embedding(module.weight)
        elif isinstance(self, RWKV7ForCausalLM) and module is self.lm_head:
            init_head(self.lm_head.weight)
        else:
            super()._init_weights(module)


class RWKV7Model(RWKV7PreTrainedModel):
    """Embedding, layers and the final norm."""

    def __init__(self, config: RWKV7Config) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(RWKV7Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = _norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    def _caches(self, use_cache: bool | None) -> bool:
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return use_cache and not (self.gradient_checkpointing and self.training)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The hidden states after the final norm, [B, T, hidden].

        Args:
            input_ids: [B, T].
            attention_mask: [B, tokens so far], 0 for padding.
            inputs_embeds: [B, T, hidden] in place of ``input_ids``.
            past_key_values: the states after previous tokens.
            use_cache: return the states; default config.json's value, False in training. Packed rows have no cache.
            kwargs: ``cu_seq_lens_q``, ``cu_seqlens`` or ``seq_idx`` of a packed row; others are ignored.

        Raises:
            ModelError: a packed row with ``past_key_values``.
        """
        x_BTD = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        row = describe_row(x_BTD, attention_mask, kwargs)
        if row.starts_BT1 is not None and past_key_values is not None:
            what = "past_key_values and sample boundaries are mutually exclusive"
            raise ModelError(what, remedy="pass one of the two", code="model.wrong_use")
        if row.starts_BT1 is None and self._caches(use_cache):
            row = replace(row, cache=RecurrentCache(self.config) if past_key_values is None else past_key_values)
        first_BTE: torch.Tensor | None = None
        for layer in self.layers:
            x_BTD, first_BTE = layer(x_BTD, first_BTE, row)
        if isinstance(row.cache, RecurrentCache):
            row.cache.seen += x_BTD.shape[1]
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x_BTD), past_key_values=row.cache)


class RWKV7ForCausalLM(RWKV7PreTrainedModel, GenerationMixin):
    """The model with its head."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: RWKV7Config) -> None:
        super().__init__(config)
        self.model = RWKV7Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the model creates its own cache

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T or fewer, vocabulary], and the loss if ``labels`` [B, T] are given.

        Args:
            logits_to_keep: number of last tokens, or indices of tokens; 0 keeps all.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)


def _norm(config: RWKV7Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
