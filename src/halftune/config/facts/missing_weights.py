"""Compares the headers of a checkpoint with the weights that its architecture has, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from halftune.config.facts.weights import Tensor
from halftune.core.errors import ModelError


def check_complete(
    headers: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Sequence[Tensor], *, where: str
) -> None:
    """Refuses a checkpoint that lacks weights, or has them in another shape: loaded, they would be random numbers.

    Only what no loader could mend: transformers renames and joins tensors of many checkpoints on the way (GPT-NeoX's
    head is stored as ``embed_out``), so a name that is not there counts as missing only where the files hold no other
    tensor that could become it. What is left open here, the load decides, with its own list of what it did not find.

    Args:
        headers: tensor name → (dtype, shape), of all weight files.
        tensors: what the architecture has.
        where: the folder, for the error.

    Raises:
        ModelError: names how many are missing or of another shape, and the first.
    """
    expected = dict(_named(tensors))
    if headers.keys() - expected.keys():
        return
    missing = [name for name in expected if name not in headers]
    # sorted: GPT-2 keeps its matrices as [in, out]
    other = [name for name, shape in expected.items() if name in headers and sorted(headers[name][1]) != sorted(shape)]
    for kind, names in (("missing", missing), ("of another shape than config.json says", other)):
        if names:
            count = "1 weight is" if len(names) == 1 else f"{len(names)} weights are"
            what = f"{count} {kind}, first {names[0]}: loaded, they would be random numbers"
            raise ModelError(what, where=where, remedy="copy or download the checkpoint again, or check config.json")


def _named(tensors: Sequence[Tensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for tensor in tensors:
        for layer in tensor.layers or ("",):
            yield tensor.name.replace("*", str(layer), 1), tensor.shape
