"""The result in fp32, merged, in main memory: what every copy of it is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import PeftModel

from halftune.config.facts.safetensors_headers import weight_files
from halftune.verify.targets.folder import ADAPTER, base_folder, load_plain

_COPIES = 6  # bytes in memory for a byte of weights in 16 bits: the result, its base and a rounded copy, in fp32


@dataclass(frozen=True)
class Exact:
    """A result.

    Attributes:
        model: merged, in fp32.
        before: the base model's weights that its adapter changes; empty without an adapter.
    """

    model: Any
    before: dict[str, torch.Tensor]

    @contextmanager
    def at(self, size: float) -> Iterator[Any]:
        """The model with the update of training at another size; 0: the base model."""
        kept = {name: one for name, one in self.model.state_dict(keep_vars=True).items() if name in self.before}
        trained = {name: one.data for name, one in kept.items()}
        try:
            for name, one in kept.items():
                one.data = torch.lerp(self.before[name], trained[name], size)
            yield self.model
        finally:
            for name, one in kept.items():
                one.data = trained[name]


def load_exact(folder: Path, base: str = "") -> Exact | str:
    """Load a result; or say how much memory is missing.

    Args:
        folder: of the result.
        base: the base model of an adapter whose own cannot be found.

    Raises:
        ModelError: it cannot be loaded.
    """
    needed = memory_needed(folder, base, _COPIES)
    if needed > psutil.virtual_memory().available:
        return f"that needs {needed / 2**30:.1f} GiB of memory"
    loaded, _ = load_plain(folder, base, torch.float32)
    if not isinstance(loaded, PeftModel):
        return Exact(loaded.cpu(), {})
    plain, _ = load_plain(base_folder(folder, base), dtype=torch.float32)
    before = dict(plain.cpu().state_dict())
    whole = merged(loaded.cpu())
    after = whole.state_dict()
    return Exact(whole, {name: one for name, one in before.items() if _changed(one, after.get(name))})


def merged(model: Any) -> Any:
    """The transformers model with the adapter in its weights."""
    return model.merge_and_unload()


def _changed(before: torch.Tensor, after: torch.Tensor | None) -> bool:
    """Whether training moved a weight; False for one with new rows, whose update has no size."""
    return after is not None and before.shape == after.shape and not before.equal(after)


def memory_needed(folder: Path, base: str, copies: int) -> int:
    """Bytes of a result's weights, ``copies`` times; 0 where they are on the hub."""
    whole = base_folder(folder, base) if (folder / ADAPTER).is_file() else folder
    return copies * sum(one.stat().st_size for one in weight_files(whole)) if whole.is_dir() else 0
