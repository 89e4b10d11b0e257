"""CUDA autocast's casting rules for CPU tensors, so that their promotions can be traced without a GPU.

``torch.autocast("cpu")`` has rules of its own: layer_norm, softmax, pow, rsqrt, cumsum and many others stay in half
precision there and become fp32 on CUDA. Inside ``cuda_autocast_rules`` the AutocastCPU dispatch key does what
AutocastCUDA does. The lists are those of torch's ``ATen/autocast_mode.h``; a test compares them with the header of the
installed torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Operands are cast to autocast's dtype.
LOWER = _names(
    """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention"""
)
# Operands are cast to fp32.
FP32 = _names(
    """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
    upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"""
)
# The result is fp32 unless the caller sets a dtype.
FP32_RESULT = _names(
    """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList"""
)
# The same, by an overload that takes a dtype.
FP32_NORMS = ("norm.Scalar", "norm.ScalarOpt_dim")
# Operands are cast to the widest dtype among them.
PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
# CUDA refuses it under autocast; unchanged here.
BANNED = ("binary_cross_entropy",)

_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


@contextmanager
def cuda_autocast_rules(device: Literal["cpu", "cuda"] = "cpu") -> Iterator[None]:
    """Inside, ``torch.autocast(device, …)`` casts like ``torch.autocast("cuda", …)``, in the whole process.

    Args:
        device: ``cuda`` for fake CUDA tensors whose device torch's own rules cannot see.
    """
    key = _KEYS[device]
    library = torch.library.Library("aten", "IMPL", key.name)
    listed = {*LOWER, *FP32, *FP32_RESULT, *FP32_NORMS, *PROMOTE, *BANNED}
    try:
        casts = ((names, partial(_cast_by, dtype_of)) for names, dtype_of in _CASTS)
        for names, make in ((FP32_RESULT, _fp32_result), *casts):
            for name in names:
                operator = _operator(name)
                _register(library, operator, make(operator, device))
        _register(library, _operator(FP32_NORMS[0]), _norm(device))
        _register(library, _operator(FP32_NORMS[1]), _norm_of_dims(device))
        # CUDA has no rule for them: those of the CPU must not apply
        for name in _known_to_cpu() - listed if device == "cpu" else ():
            _register(library, _operator(name), torch.library.fallthrough_kernel)
        yield
    finally:
        library._destroy()


def _known_to_cpu() -> set[str]:
    found = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    return {name.removeprefix("aten::") for name in found if name.startswith("aten::")}


def _register(library: torch.library.Library, operator: Any, kernel: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(operator, kernel, allow_override=True)


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _without_autocast(device: str) -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEYS[device]))


def _eligible(value: Any, device: str) -> bool:
    """Whether autocast casts a tensor: floating, on its device, not fp64."""
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and value.is_floating_point() and value.dtype is not torch.float64 and value.device.type == device


def _cast_by(dtype_of: Callable[[Any, str], torch.dtype], operator: Any, device: str) -> Callable[..., Any]:
    """The operator with its operands cast to the dtype that they and the device ask for."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast(device):
            dtype = dtype_of((args, kwargs), device)
            cast = lambda value: value.to(dtype) if _eligible(value, device) else value  # noqa: E731
            args, kwargs = pytree.tree_map(cast, (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


def _lower(_values: Any, device: str) -> torch.dtype:
    return torch.get_autocast_dtype(device)


def _fp32(_values: Any, _device: str) -> torch.dtype:
    return torch.float32


def _promote(values: Any, device: str) -> torch.dtype:
    operands = [leaf for leaf in pytree.tree_leaves(values) if _eligible(leaf, device)]
    wide = any(operand.dtype is torch.float32 for operand in operands)
    return torch.float32 if wide else torch.get_autocast_dtype(device)


def _fp32_result(operator: Any, device: str) -> Callable[..., Any]:
    at = [argument.name for argument in operator._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast(device):
            dtype = args[at] if len(args) > at else kwargs.get("dtype")
            if dtype is None and _eligible(args[0], device):
                args, kwargs = args[:at], {**kwargs, "dtype": torch.float32}
            return operator(*args, **kwargs)

    return kernel


_CASTS = ((LOWER, _lower), (FP32, _fp32), (PROMOTE, _promote))


def _norm(device: str) -> Callable[..., torch.Tensor]:
    def kernel(self: torch.Tensor, p: Any = 2) -> torch.Tensor:
        with _without_autocast(device):
            return torch.ops.aten.norm.ScalarOpt_dtype(self, p, dtype=torch.float32)

    return kernel


def _norm_of_dims(device: str) -> Callable[..., torch.Tensor]:
    def kernel(self: torch.Tensor, p: Any, dim: list[int], keepdim: bool = False) -> torch.Tensor:
        with _without_autocast(device):
            return torch.ops.aten.norm.ScalarOpt_dim_dtype(self, p, dim, keepdim, dtype=torch.float32)

    return kernel
