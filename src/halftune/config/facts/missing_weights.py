"""Compares a checkpoint's headers with the weights of its architecture, before loading."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from halftune.config.facts.architecture import Tensor
from halftune.core.errors import ModelError


def check_complete(
    headers: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Sequence[Tensor], *, where: str
) -> None:
    """Refuse a checkpoint with missing weights or wrong shapes: loaded, they would be random.

    transformers renames and merges tensors of many checkpoints (GPT-NeoX's head is stored as ``embed_out``), so a name
    counts as missing only if the files have no unexpected tensors. Otherwise loading reports missing weights.

    Args:
        headers: tensor name → (dtype, shape), of all weight files.
        tensors: the architecture's tensors.
        where: the folder, for the error.

    Raises:
        ModelError: weights are missing or have wrong shapes; names their number and the first.
    """
    expected = dict(_named(tensors))
    if headers.keys() - expected.keys():
        return
    missing = [name for name in expected if name not in headers]
    # sorted: GPT-2 stores matrices as [in, out]
    other = [name for name, shape in expected.items() if name in headers and sorted(headers[name][1]) != sorted(shape)]
    for kind, names in (("missing", missing), ("in another shape than in config.json", other)):
        if names:
            count = "1 weight is" if len(names) == 1 else f"{len(names)} weights are"
            what = f"{count} {kind}, first {names[0]}: they would be random"
            raise ModelError(
                what,
                where=where,
                remedy="copy or download the checkpoint again, or check config.json",
                code="model.weights_mismatch",
            )


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MTP = re.compile(r"(?:^|\.)mtp(?:\.|_)")


def prediction_heads(names: Iterable[str], layers: int) -> list[str]:
    """Return the tensors for multi-token prediction: in ``mtp``, or in layers beyond ``layers``.

    transformers ignores them; inference servers use them for speculative decoding.
    """
    return [name for name in names if _MTP.search(name) or ((at := _LAYER.search(name)) and int(at[1]) >= layers)]


def _named(tensors: Sequence[Tensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for tensor in tensors:
        for layer in tensor.layers or ("",):
            yield tensor.name.replace("*", str(layer), 1), tensor.shape
