"""NEFTune: uniform noise on the input embeddings in training (arXiv:2310.05914)."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from torch import nn


def add_noise(model: nn.Module, alpha: float) -> None:
    """Add noise to the embeddings [B, T, H] of each forward pass in training mode with gradients.

    The noise of a token is uniform in ±alpha / sqrt(L · H), with L the length of its own segment without padding: it is
    the same for packed and for padded rows. It is drawn from the device's default generator, in the embeddings' dtype.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    given: dict[str, Any] = {}

    def keep(_module: nn.Module, _args: Any, inputs: dict[str, Any]) -> None:
        given.update(mask=inputs.get("attention_mask"), bounds=inputs.get("cu_seq_lens_q"))

    def noise(module: nn.Module, _args: Any, embedded: torch.Tensor) -> torch.Tensor:
        if not (module.training and torch.is_grad_enabled()):
            return embedded
        lengths = _lengths(embedded, given["mask"], given["bounds"])
        limit = alpha * (lengths * embedded.shape[-1]).rsqrt()
        return embedded + torch.empty_like(embedded).uniform_(-1, 1) * limit[..., None].to(embedded.dtype)

    base.register_forward_pre_hook(keep, with_kwargs=True)
    base.get_input_embeddings().register_forward_hook(noise)


def _lengths(embedded: torch.Tensor, mask: torch.Tensor | None, bounds: torch.Tensor | None) -> torch.Tensor:
    """The length of each token's segment, fp32 [B, T], or [B, 1] if it is the same in a row."""
    if bounds is not None:
        sizes = bounds.diff()
        return sizes.repeat_interleave(sizes, output_size=embedded.shape[1])[None].float()
    if mask is not None:
        # at least 1, by which is divided: a row may be padding alone
        return mask.sum(1, keepdim=True).clamp(min=1).float()
    return torch.full((1, 1), float(embedded.shape[1]), device=embedded.device)
