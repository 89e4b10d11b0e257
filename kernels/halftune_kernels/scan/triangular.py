"""Inverses of small unit lower triangular matrices, which the delta rule needs one of per chunk."""

from __future__ import annotations

import torch

_SOLVED = 32  # up to this size one triangular solve; above it, halves and two matrix products are faster


def unit_lower_inverse(strict: torch.Tensor) -> torch.Tensor:
    """(I + L)⁻¹ for L strictly lower triangular, by forward substitution, which keeps digits that a power series loses.

    Args:
        strict: [U, C, C]; only what is below the diagonal is read.

    Returns:
        [U, C, C], zeros above the diagonal.
    """
    size = strict.shape[-1]
    if size <= _SOLVED:
        identity = torch.eye(size, dtype=strict.dtype, device=strict.device).expand_as(strict)
        return torch.linalg.solve_triangular(strict, identity, upper=False, unitriangular=True)
    half = size // 2
    inverse = strict.new_zeros(strict.shape)
    if size == 2 * half:  # one call for both halves
        halves = torch.cat((strict[:, :half, :half], strict[:, half:, half:]))
        first, second = unit_lower_inverse(halves).chunk(2)
    else:
        first = unit_lower_inverse(strict[:, :half, :half])
        second = unit_lower_inverse(strict[:, half:, half:])
    inverse[:, :half, :half] = first
    inverse[:, half:, half:] = second
    inverse[:, half:, :half] = -torch.bmm(second, torch.bmm(strict[:, half:, :half], first))
    return inverse
