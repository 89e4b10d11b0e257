"""The weights of an architecture by name, built on the meta device in a separate process.

Before loading, a checkpoint's headers are compared with them.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from halftune.core.atomic import write_text
from halftune.core.errors import ConfigError, ModelError
from halftune.core.files import MOST_JSON, cache_dir, read_json
from halftune.core.log import get_logger

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MTP = re.compile(r"(?:^|\.)mtp(?:\.|_)")
log = get_logger(__name__)
TensorKind = Literal["linear", "conv1d", "router", "head", "embedding", "experts", "parameter"]
_WRONG_TYPE = "StrictDataclassFieldValidationError"  # of huggingface_hub
NotBuilt = Literal["sizes", "unbuilt"]
BUILDER = "halftune.model.meta.shapes"
TIME_LIMIT = 300.0  # seconds; importing torch the first time takes a minute on a slow disk
_NOTICE = 20.0  # seconds until it is said what the process waits for
FORMAT = 9  # version of cached answers
# More than any model has; building layers takes time even on the meta device.
MOST_LAYERS = 2000


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
    expected = {name: tensor.shape for tensor in tensors for name in tensor.names()}
    if headers.keys() - expected.keys():
        return
    missing = [name for name in expected if name not in headers]
    # sorted: GPT-2 stores matrices as [in, out]
    other = [name for name, shape in expected.items() if name in headers and sorted(headers[name][1]) != sorted(shape)]
    for kind, names in (("missing", missing), ("of the wrong shape for config.json", other)):
        if names:
            count = "1 weight is" if len(names) == 1 else f"{len(names)} weights are"
            what = f"{count} {kind}, first {names[0]}: they would be random"
            remedy = "copy or download the checkpoint again, or check config.json"
            raise ModelError(what, where=where, remedy=remedy, code="model.weights_mismatch")


def prediction_heads(names: Iterable[str], layers: int) -> list[str]:
    """Return the tensors for multi-token prediction: in ``mtp``, or in layers beyond ``layers``.

    transformers ignores them; inference servers use them for speculative decoding.
    """
    return [name for name in names if _MTP.search(name) or ((at := _LAYER.search(name)) and int(at[1]) >= layers)]


@dataclass(frozen=True)
class Tensor:
    """Equal weight tensors, one per layer in ``layers``.

    Attributes:
        name: full parameter name, with ``*`` for the layer index.
        shape: torch's shape, ``[out, in]`` for a linear layer.
        layers: indices of the layers that have it; empty for a tensor outside the layers.
        kind: ``linear`` for the weight of an ``nn.Linear``, ``conv1d`` for that of transformers' ``Conv1D``, which
            adapters can wrap; ``router`` for one that ``all-linear`` excludes; ``head`` for that of the output layer;
            ``embedding`` for a look-up table; ``experts`` for fused experts that ``grouped_mm`` multiplies;
            ``parameter`` for all else (norms, biases, fused experts of other code).
    """

    name: str
    shape: tuple[int, ...]
    layers: tuple[int, ...] = ()
    kind: TensorKind = "parameter"

    @property
    def count(self) -> int:
        """Number of these tensors."""
        return len(self.layers) or 1

    @property
    def size(self) -> int:
        """Number of elements of one tensor."""
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """Name of its module, with ``*`` for the layer index."""
        return self.name.rpartition(".")[0]

    def names(self) -> Iterator[str]:
        """Return the names of these tensors, one per layer."""
        return (self.name.replace("*", str(layer), 1) for layer in self.layers or ("",))

    def modules(self) -> Iterator[str]:
        """Return the names of its modules, one per layer."""
        return (name.rpartition(".")[0] for name in self.names())


def total_elements(tensors: Iterable[Tensor]) -> int:
    """Return the number of elements of all tensors, in all layers."""
    return sum(tensor.size * tensor.count for tensor in tensors)


@dataclass(frozen=True)
class Architecture:
    """An architecture as built by transformers.

    Attributes:
        text: the decoder's settings, with defaults.
        tied: whether head and embedding share weights.
        towers: the towers' weights.
        tensors: the language model's weights.
        lacks: of ``flash``, ``sdpa`` and ``flex``, what the decoder's class declares as unsupported; ``windows`` if
            FlashAttention would lose the windows of its masks, ``windows_unchecked`` if that is not known.
        experts: linear layers that peft treats as experts.
    """

    text: dict[str, Any]
    tied: bool
    towers: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]
    lacks: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()


class Refused(str):
    """What transformers says of a value whose type is wrong: loading would fail, too."""


def architecture_of(raw: dict[str, Any], *, multimodal: bool) -> Architecture | None:
    """Return the architecture of a parsed config.json; None if it is not built."""
    found = architecture_or_reason(raw, multimodal=multimodal)
    return found if isinstance(found, Architecture) else None


def architecture_or_reason(
    raw: dict[str, Any], *, multimodal: bool, where: str = "config.json"
) -> Architecture | NotBuilt:
    """Return the architecture of a parsed config.json, or why there is none.

    Cached in the user's cache by the config's content and transformers' version. Remote code is not executed.

    Returns:
        The architecture; ``sizes`` if transformers cannot build it; ``unbuilt`` if that could not be tried, which is
        logged.

    Raises:
        ModelError: a value has the wrong type; names the file ``where``.
    """
    found = _architecture(json.dumps(raw, sort_keys=True, default=str), multimodal)
    if isinstance(found, Refused):
        remedy = "correct config.json, or download it again"
        raise ModelError(found.removeprefix("config.json: "), where=where, remedy=remedy, code="model.config_invalid")
    return found


@lru_cache(maxsize=64)
def _architecture(config: str, multimodal: bool) -> Architecture | NotBuilt | Refused:
    raw = json.loads(config)
    if _too_deep(raw):
        return "sizes"
    try:
        said = "|".join((config, str(multimodal), version("transformers"), str(FORMAT)))
        path = cache_dir() / "architectures" / f"{hashlib.sha256(said.encode()).hexdigest()}.json"
    except (PackageNotFoundError, ConfigError):  # an unwritable cache is reported when builtin weights are built
        path = None
    if path is not None:
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # others may write to a shared cache
            return _read(read_json(path, MOST_JSON))
    answer = _built(raw, multimodal)
    try:
        if path and answer.keys() & {"tensors", "error"}:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(answer))
    except OSError as error:
        log.debug("cannot cache %s: %s", path, error)
    return _read(answer)


def _read(answer: dict[str, Any]) -> Architecture | NotBuilt | Refused:
    if "error" in answer:
        kind, _, said = str(answer["error"]).partition(": ")
        log.debug("cannot build the architecture: %s", answer["error"])
        return Refused(said.partition(". Errors:")[0]) if kind == _WRONG_TYPE else "sizes"
    if "tensors" not in answer:
        what = (
            "the architecture is not built: %s; sizes are estimated, and missing weights are found while loading only"
        )
        log.warning(what, answer.get("missing"))
        return "unbuilt"
    towers, tensors = (
        tuple(Tensor(name, tuple(shape), tuple(layers), kind) for name, shape, kind, layers in answer[part])
        for part in ("towers", "tensors")
    )
    lacks, experts = (tuple(answer[name]) for name in ("lacks", "experts"))
    return Architecture(answer["text"], answer["tied"], towers, tensors, lacks, experts)


def _too_deep(part: Any) -> bool:
    """Whether a config or sub-config has more layers than any model."""
    if not isinstance(part, dict):
        return False
    counts = (value for key, value in part.items() if key.endswith(("layers", "n_layer", "depth")))
    deep = any(isinstance(value, int) and value > MOST_LAYERS for value in counts)
    return deep or any(_too_deep(value) for value in part.values())


def _built(raw: dict[str, Any], multimodal: bool) -> dict[str, Any]:
    """The builder's answer; ``{"missing": …}`` if there is none, so that it is not cached."""
    request = {"raw": raw, "multimodal": multimodal}
    if "torch" in sys.modules and "transformers" in sys.modules:  # no need for another process
        return _built_here(request)
    why = ""
    for _ in range(2):  # one that was killed on a busy machine is started again
        try:
            return json.loads(_helper(json.dumps(request)))
        except subprocess.TimeoutExpired:
            log.warning("building the architecture took more than %.0f s: trying in this process", TIME_LIMIT)
            return _built_here(request)
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip().splitlines()[-1:]
            why = f"its process was killed by signal {-error.returncode}" if error.returncode < 0 else " ".join(said)
        except (OSError, ValueError) as error:
            why = f"its process did not answer: {error}"
    return {"missing": why}


def _built_here(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(importlib.import_module(BUILDER).describe(**request), default=str))
    except ImportError as error:
        return {"missing": str(error)}


def _helper(request: str) -> str:
    """What a process of its own prints.

    Raises:
        subprocess.SubprocessError: it takes longer than the limit, or fails.
        OSError: it cannot be started.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    what = "still building the architecture from config.json, for at most %.0f s"
    notice = threading.Timer(_NOTICE, log.info, (what, TIME_LIMIT))
    notice.start()
    try:
        done = subprocess.run(
            [sys.executable, "-m", BUILDER],
            input=request, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT, check=True,
        )  # fmt: skip
    finally:
        notice.cancel()
    return done.stdout
