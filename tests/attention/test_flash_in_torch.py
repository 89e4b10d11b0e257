"""flash_attn's functions in plain torch: against attention written out in fp64, every gradient."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
from standins.flash import flash_attn_installed

from halftune.attention.contract import ENTRY_POINTS
from halftune.attention.flash_in_torch import IN_TORCH

B, T, S, H, G, D = 2, 5, 9, 4, 2, 8


def written_out(q, k, v, *, causal=False, window=(-1, -1), softcap=0.0, slopes=None, scale=None):
    """One query and head at a time, fp64."""
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for t in range(q.shape[1]):
                at, kv = t + k.shape[1] - q.shape[1], h // (q.shape[2] // k.shape[2])
                left, right = window[0], 0 if causal else window[1]
                seen = [s for s in range(k.shape[1]) if (left < 0 or at - s <= left) and (right < 0 or s - at <= right)]
                if not seen:
                    continue
                scores = (k[b, seen, kv] @ q[b, t, h]) * (q.shape[-1] ** -0.5 if scale is None else scale)
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if slopes is not None:
                    scores = scores - slopes[h].double() * (at - torch.tensor(seen)).abs()
                out[b, t, h] = scores.softmax(-1) @ v[b, seen, kv]
    return out


def operands(queries: int = T) -> list[torch.Tensor]:
    shapes = ((B, queries, H, D), (B, S, G, D), (B, S, G, D))
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": (2, 0)},
        {"window": (1, 2), "scale": 0.3},
        {"causal": True, "softcap": 3.0},
        {"causal": True, "slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    ],
)
@pytest.mark.parametrize("queries", [T, S + 3])  # more queries than keys: the first see nothing
def test_forward_and_every_gradient(options: dict, queries: int) -> None:
    exact = operands(queries)
    single = [operand.detach().float().requires_grad_() for operand in exact]
    names = {"window": "window_size", "slopes": "alibi_slopes", "scale": "softmax_scale"}
    out = IN_TORCH["flash_attn_func"](*single, **{names.get(name, name): value for name, value in options.items()})
    reference = written_out(*exact, **options)
    weights = torch.randn_like(reference)
    (out * weights.float()).sum().backward()
    (reference * weights).sum().backward()
    assert (out - reference).norm() / reference.norm() < 1e-6
    for mine, theirs in zip(single, exact, strict=True):
        assert (mine.grad - theirs.grad).norm() / theirs.grad.norm() < 1e-6


def test_packed_rows_are_each_sample_alone() -> None:
    q, k, v = (torch.randn(9, heads, D) for heads in (H, G, G))
    cu, slopes = torch.tensor([0, 4, 4, 9]), torch.rand(3, H)
    packed = IN_TORCH["flash_attn_varlen_func"](q, k, v, cu, cu, 5, 5, causal=True, alibi_slopes=slopes)
    for row, (a, b) in enumerate(pairwise(cu.tolist())):
        alone = IN_TORCH["flash_attn_func"](
            q[None, a:b], k[None, a:b], v[None, a:b], causal=True, alibi_slopes=slopes[row]
        )
        assert torch.equal(packed[a:b], alone[0])
    for name, tensors, lengths in (
        ("flash_attn_varlen_kvpacked_func", (q, torch.stack((k, v), 1)), (cu, cu, 5, 5)),
        ("flash_attn_varlen_qkvpacked_func", (torch.stack((q, q, q), 1),), (cu, 5)),
    ):
        plain = (q, k, v) if name.endswith("kvpacked_func") and len(tensors) == 2 else (q, q, q)
        assert torch.equal(
            IN_TORCH[name](*tensors, *lengths, causal=True),
            IN_TORCH["flash_attn_varlen_func"](*plain, cu, cu, 5, 5, causal=True),
        )


def test_every_function_that_models_import_is_there_with_its_parameters() -> None:
    with flash_attn_installed():
        import flash_attn.flash_attn_interface as package

        names = {entry.name for entry in ENTRY_POINTS} - {"flash_attn_with_kvcache"}  # writes into half caches only
        assert len(names) >= 6
        for name in names:
            theirs = inspect.signature(vars(package)[name]).parameters
            assert list(inspect.signature(IN_TORCH[name]).parameters) == list(theirs)
