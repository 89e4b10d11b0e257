"""4-bit linear layers without values, as bitsandbytes has them after quantisation on load."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from halftune.config.weight_formats import format_of
from halftune.core.optional import need
from halftune.plan import Plan
from halftune.precision.dtypes import torch_dtype

_BLOCK, _OUTER = 64, 256  # weights of a scale, and scales of an outer scale
FORMATS = ("nf4", "nf4_single")


def pack_linear_layers(model: PreTrainedModel, plan: Plan, device: torch.device) -> int:
    """Replace the linear layers that quantisation on load would pack; returns their number.

    Args:
        model: without values, inside ``FakeTensors``.
        plan: whose weights have one of ``FORMATS``.
        device: of the packed weights.

    Raises:
        MissingPackageError: bitsandbytes is not installed.
    """
    settings = format_of(plan.weights.format.value)
    need(settings.package, why=f"model.quantization: {plan.weights.format.value}")
    compute = torch_dtype(plan.precision.compute.value)
    config = BitsAndBytesConfig(**{**settings.on_load, "bnb_4bit_compute_dtype": compute})
    quantizer, in_fp32 = Bnb4BitHfQuantizer(config, pre_quantized=False), list(model._keep_in_fp32_modules or ())
    kept = quantizer.get_modules_to_not_convert(model, None, in_fp32)
    layers = [(name, one) for name, one in model.named_modules() if type(one) is nn.Linear]
    chosen = [(name, one) for name, one in layers if should_convert_module(name, kept)]
    for name, layer in chosen:
        model.set_submodule(name, _packed(layer, compute, device, nested=config.bnb_4bit_use_double_quant))
    vars(model).update(is_loaded_in_4bit=True, is_quantized=True)
    return len(chosen)


def _packed(layer: nn.Linear, compute: torch.dtype, device: torch.device, *, nested: bool) -> Any:
    from bitsandbytes.functional import QuantState  # few runs have 4-bit weights
    from bitsandbytes.nn.modules import Linear4bit

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    rows, columns = layer.weight.shape
    scales = -(-rows * columns // _BLOCK)
    outer = {}
    if nested:
        state = QuantState(new(-(-scales // _OUTER)), code=new(256), blocksize=_OUTER, dtype=torch.float32)
        outer = {"offset": new(), "state2": state}
    absmax = new(scales, dtype=torch.uint8 if nested else torch.float32)
    with _disable_current_modes(), unset_fake_temporarily():  # its weight is of a class that fake tensors cannot have
        made = Linear4bit(1, 1, bias=False, compute_dtype=compute, quant_type="nf4", compress_statistics=nested)
    weight: Any = nn.Parameter(new(-(-rows * columns // 2), 1, dtype=torch.uint8), requires_grad=False)
    weight.quant_type, weight.compress_statistics = "nf4", nested
    shape = torch.Size((rows, columns))
    weight.quant_state = QuantState(absmax, shape, new(16), _BLOCK, "nf4", compute, **outer)
    made.in_features, made.out_features = columns, rows
    made.weight, made.bias = weight, layer.bias
    return made


def unpacked_product(
    x: torch.Tensor,
    packed: torch.Tensor,
    shape: list[int],
    scales: torch.Tensor,
    block: int,
    kind: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """``bitsandbytes::gemm_4bit`` of many rows, as its kernel for GPUs computes it: the weight, then the product."""
    unpack: Any = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        scales = unpack.dequantize_blockwise(absmax_8bit, scales, absmax_code, _OUTER, torch.float32) + absmax_offset
    weight = unpack.dequantize_4bit(packed, scales, block, kind, shape, x.dtype).t()
    rows = x.flatten(0, -2)
    out = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return out.view(*x.shape[:-1], shape[0])
