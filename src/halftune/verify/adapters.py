"""Compares two adapters by what they add to the base model, and the base models behind them."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig

from halftune.config.facts.safetensors_headers import weight_files
from halftune.config.sections.model import ModelSection
from halftune.core.manifest import manifest_facts
from halftune.core.processes import heartbeat
from halftune.model.files.architectures import ignore_peft_warnings
from halftune.model.files.identity import model_identity
from halftune.model.files.load_errors import LOAD_ERRORS
from halftune.model.files.result import BASE
from halftune.verify.exact import Exact, memory_needed
from halftune.verify.settings import of_configs, of_tokenizers
from halftune.verify.targets import Finding
from halftune.verify.targets.folder import WEIGHTS, FolderTarget, load_plain, plain_tokenizer
from halftune.verify.weights import compare_weights, findings_of, first, kind_of, of_update

_OURS, _THEIRS = "reference", "default"  # names of the adapters in one model
_FINEST = 2e-6  # relative: sums of ranks in another order, in fp32
_BESIDE = ("magnitude_vector", ".bias")  # of a layer's tensors, what is not in its product
_COPIES = 5  # bytes in memory for a byte of weights: two models in fp32


def compare_adapters(reference: Path, target: FolderTarget) -> list[Finding]:
    """Compare what two adapters add to each layer; their other tensors one by one.

    Args:
        reference: folder of the result's adapter.
        target: of kind ``adapter``.
    """
    try:
        ours, theirs = (load_file(folder / WEIGHTS) for folder in (reference, target.folder))
        used = get_peft_model_state_dict(target.model, save_embedding_layers=False).keys()
        with ignore_peft_warnings():
            target.model.load_adapter(str(reference), adapter_name=_OURS)
    except (*LOAD_ERRORS, SafetensorError) as error:
        return [Finding("weights.differ", f"the result's adapter cannot be loaded on the base there: {error}"[:300])]
    eps = max([torch.finfo(one.dtype).eps for one in theirs.values() if one.is_floating_point()], default=0.0)
    kinds: dict[str, list[tuple[str, float]]] = defaultdict(list)
    layers = [(name, one) for name, one in target.model.named_modules() if _adds(one)]
    for name, layer in layers:
        heartbeat.beat()
        kind, size = _kind(layer, max(eps, _FINEST))
        kinds[kind].append((name, size))
    target.model.delete_adapter(_OURS)
    prefix, names = str(target.model.base_model.prefix), {name for name, _ in layers}  # lora_

    def is_part(key: str) -> bool:  # of a product that was compared
        return prefix in key and not any(one in key for one in _BESIDE) and key.split(f".{prefix}")[0] in names

    first_side = {key: one for key, one in ours.items() if not is_part(key)}
    spare = [key for key in theirs if prefix in key and key not in used]  # peft makes nothing of them
    second_side = {key: one for key, one in theirs.items() if not is_part(key) and key not in spare}
    for key, one in first_side.items():
        kind = kind_of(second_side[key], one.float(), None)[0] if key in second_side else "base"
        kinds[kind].append((key, 0.0))
    kinds["other"] += [(key, 0.0) for key in [*(second_side.keys() - ours.keys()), *set(spare) - ours.keys()]]
    return findings_of(kinds, len(layers) + len(first_side))


def _adds(layer: Any) -> bool:
    """Whether a layer computes what an adapter adds to it."""
    return isinstance(layer, BaseTunerLayer) and hasattr(layer, "get_delta_weight")


def _kind(layer: Any, eps: float) -> tuple[str, float]:
    """How the product of the target's adapter differs from the reference's; see ``of_update``."""
    there = layer._get_available_adapters()
    if not {_OURS, _THEIRS} <= there:
        return ("base" if _OURS in there else "other"), 0.0
    wanted, moved = (layer.get_delta_weight(one).detach().float().cpu() for one in (_OURS, _THEIRS))
    if wanted.shape != moved.shape:
        return "shape", 0.0
    apart = (moved - wanted).abs()
    if bool((apart <= eps * _spread(layer, wanted)).all()):  # false for NaN
        return "same", 1.0
    kind, size = of_update(moved, wanted, float(eps * wanted.double().norm()))
    return ("other" if kind == "same" else kind), size


def _spread(layer: Any, wanted: torch.Tensor) -> torch.Tensor:
    """Size of each sum's parts, times what rounding them moves at most."""
    try:
        down, up = (one[_OURS].weight.detach().float() for one in (layer.lora_A, layer.lora_B))
        parts = (up.square() @ down.square()).sqrt().cpu()
        return 3 * layer.scaling[_OURS] * (parts if parts.shape == wanted.shape else parts.T)
    except (AttributeError, KeyError, RuntimeError):  # not a product of two matrices
        return 3 * (wanted.abs() + wanted.square().mean().sqrt())


def compare_bases(reference: Path, ours: Path, theirs: Path) -> tuple[list[Finding], list[Finding]]:
    """Compare the base models of two adapters, by checksum or by value; also what could not be compared.

    Args:
        reference: folder of the result, which knows the checksums of its base.
        ours, theirs: folders of the base models.
    """
    if not (ours.is_dir() and theirs.is_dir()):
        return [], [Finding("base.unknown", f"{theirs} is not a folder here")] if ours != theirs else []
    if ours.resolve() == theirs.resolve():
        return _of_record(reference, theirs)
    tokenizers = [plain_tokenizer(one) for one in (ours, theirs) if (one / "tokenizer_config.json").is_file()]
    found = [Finding("base.differ", one.what) for one in (of_tokenizers(*tokenizers) if tokenizers[1:] else ())]
    changed = of_configs(*map(AutoConfig.from_pretrained, (ours, theirs)))
    found += [Finding("base.differ", ", ".join(changed))] if changed else []
    if _digests(ours) == _digests(theirs):
        return found, []
    needed = memory_needed(ours, "", _COPIES)
    if needed > psutil.virtual_memory().available:
        return found, [Finding("base.unknown", f"comparing its weights needs {needed / 2**30:.1f} GiB of memory")]
    (expected, _), (other, absent) = load_plain(ours, dtype=torch.float32), load_plain(theirs)
    differing = compare_weights(Exact(expected.cpu(), {}), other, absent)
    return found + [Finding("base.differ", one.what) for one in differing if one.code != "weights.config"], []


def _of_record(reference: Path, base: Path) -> tuple[list[Finding], list[Finding]]:
    """Whether the files of a base model are those that training has read."""
    record = manifest_facts(reference).get(BASE, {}).get("files", {})
    now = model_identity(ModelSection(name_or_path=str(base)))["files"]
    changed = [name for name in record.keys() & now.keys() if record[name]["digest"] != now[name]["digest"]]
    weights = sorted(name for name in changed if name.endswith(".safetensors"))
    return [Finding("base.differ", f"{first(weights)} changed since training")] if weights else [], []


def _digests(folder: Path) -> list[str]:
    digests = []
    for path in weight_files(folder):
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests
