"""Tensors that follow from sizes alone are made once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.utils._python_dispatch import is_in_torch_dispatch_mode

P = ParamSpec("P")
R = TypeVar("R")


def constant(most: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Keep the last ``most`` results of a function of hashable arguments.

    Under a dispatch mode nothing is kept and nothing kept is given: fake tensors have no data, and what a real sum is
    given of one is lost without an error.
    """

    def decorated(make: Callable[P, R]) -> Callable[P, R]:
        kept = functools.lru_cache(maxsize=most)(make)

        @functools.wraps(make)
        def get(*args: P.args, **kwargs: P.kwargs) -> R:
            return make(*args, **kwargs) if is_in_torch_dispatch_mode() else kept(*args, **kwargs)

        return get

    return decorated
