"""Compares the weights of two folders: which tensor differs, and how."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from halftune.config.facts.folder import read_json
from halftune.core.processes import heartbeat
from halftune.verify.targets import Finding
from halftune.verify.targets.folder import ADAPTER, WEIGHTS, FolderTarget, base_folder, base_of, load_plain

_SCALE = 0.1  # how far from 0 and from 1 the size of an update may be
_ROUNDED_TWICE = 0.005  # share of a tensor's elements that are off by more than one rounding
_ROUNDINGS = 5.0  # last places that several roundings move, of the value and of a usual update
_TINY = 2.0**-24  # the smallest number of fp16: what a format between may have lost
_ONE = 0.5 + 1e-3  # roundings of a value, in units of its last place; a tie may go either way
_NAMED = 3
# keys of config.json that change no number, or that other findings name
_FREE = {"dtype", "torch_dtype", "transformers_version", "use_cache", "architectures", "_name_or_path", "vocab_size"}
_FREE |= {"tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "_attn_implementation"}
_OF_TRAINING = ("dropout", "_pdrop", "initializer_range", "aux_loss_coef", "output_router_logits")  # ends of such keys
# keys of adapter_config.json that change what the adapter computes
_SCALES = ("lora_alpha", "r", "use_rslora", "alpha_pattern", "rank_pattern", "use_dora", "fan_in_fan_out")


def compare_weights(
    reference: Path, target: FolderTarget, base: str = "", *, quantised: bool = False
) -> tuple[list[Finding], str]:
    """Compare a folder's weights with a result's: an adapter's files, or the merged weights in fp32.

    Also says why they were not compared one by one; empty if they were.

    Args:
        reference: folder of the result.
        target: what is compared; not an adapter if the reference is none.
        base: the base model of adapters whose own cannot be found.
        quantised: the result was trained on quantised weights, which its files do not have.

    Raises:
        ModelError: the reference cannot be loaded.
    """
    if target.kind == "adapter":
        return _of_adapters(reference, target) if (reference / ADAPTER).is_file() else ([], "the result is no adapter")
    model = base_of(target.model)
    if quantised or getattr(model.config, "quantization_config", None) is not None:
        return [], "one side is quantised"
    needed = 8 * sum(one.numel() for one in model.parameters())
    if needed > psutil.virtual_memory().available:
        return [], f"that needs {needed / 2**30:.1f} GiB of memory"
    expected, before = _expected(reference, base)
    findings = [*_of_configs(expected, model), *_of_heads(expected, model, target.absent)]
    kinds: dict[str, list[tuple[str, float]]] = defaultdict(list)
    theirs = dict(model.state_dict())
    for name, tensor in expected.state_dict().items():
        heartbeat.beat()
        if name not in theirs or name in target.absent or not tensor.is_floating_point():
            continue
        kind, size = _judged(theirs[name].cpu(), tensor, before.get(name))
        kinds[kind].append((name, size))
    return findings + _findings(kinds, len(before), model), ""


def _expected(reference: Path, base: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """The result's model in fp32, merged, and the base's weights that the adapter changes."""
    loaded, _ = load_plain(reference, base, torch.float32)
    loaded = loaded.cpu()
    if not isinstance(loaded, PeftModel):
        return loaded, {}
    plain, _ = load_plain(base_folder(reference, base), dtype=torch.float32)
    before = dict(plain.cpu().state_dict())
    merged: Any = loaded.merge_and_unload()  # pyright: ignore[reportCallIssue]
    after = merged.state_dict()
    return merged, {name: one for name, one in before.items() if _changed(one, after.get(name))}


def _changed(before: torch.Tensor, after: torch.Tensor | None) -> bool:
    """Whether training moved a weight; False for one with new rows, whose update has no size."""
    return after is not None and before.shape == after.shape and not before.equal(after)


def _of_configs(expected: Any, model: Any) -> list[Finding]:
    """Keys of config.json that change what the model computes."""
    ours, theirs = (one.config.get_text_config().to_dict() for one in (expected, model))
    changed = [
        f"{key} is {theirs.get(key)} instead of {ours.get(key)}"
        for key in sorted(ours.keys() | theirs.keys())
        if key not in _FREE and not key.endswith(_OF_TRAINING) and ours.get(key) != theirs.get(key)
    ]
    return [Finding("weights.config", ", ".join(changed))] if changed else []


def _of_heads(expected: Any, model: Any, absent: list[str]) -> list[Finding]:
    """Weights that the files lack, and a head that is tied to the embeddings in one of the two only."""
    ties = [bool(getattr(one.config.get_text_config(), "tie_word_embeddings", False)) for one in (expected, model)]
    found = []
    if ties[0] != ties[1]:
        words = ("a tied head", "a head of its own")
        found.append(Finding("weights.head", f"{words[ties[0]]} instead of {words[not ties[0]]}"))
    if absent:
        what = f"{len(absent)} weights are not in its files and are random there: {_first(absent)}"
        found.append(Finding("weights.absent", what))
    return found


def _judged(theirs: torch.Tensor, ours: torch.Tensor, base: torch.Tensor | None) -> tuple[str, float]:
    """How a tensor differs from the one in fp32, and the size of the update in it where it has another."""
    if theirs.shape != ours.shape:
        return "shape", 0.0
    if theirs.equal(ours.to(theirs.dtype)):
        return "same", 1.0
    theirs_32 = theirs.float()
    apart = (theirs_32 - ours).abs()
    places = _last_place(ours, theirs.dtype)
    allowed = _allowed(ours, base, theirs.dtype)
    near = bool((apart <= allowed).all())  # false for NaN
    if near and float((apart > _ONE * places).float().mean()) <= _ROUNDED_TWICE:
        return "same", 1.0
    if _turned(theirs_32, ours, allowed):
        return "transposed", 0.0
    if base is not None:
        moved, wanted = (theirs_32 - base).flatten().double(), (ours - base).flatten().double()
        size = float(moved @ wanted / (wanted @ wanted))
        noise = float(places.double().norm())
        if float((moved - size * wanted).norm()) <= 2 * noise + 0.1 * float(wanted.norm()) * max(abs(size), 1):
            if abs(size) <= _SCALE:
                return "base", size
            if abs(size - 1) > _SCALE:
                return "scaled", size
    return ("rounded", 1.0) if near else ("other", 0.0)


def _allowed(ours: torch.Tensor, base: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """How far several roundings move each value: of the base's weight, of the update, and of their sum."""
    largest, update = ours.abs(), 0.0
    if base is not None:
        largest, update = largest.maximum(base.abs()), float((ours - base).square().mean().sqrt())
    return (_ROUNDINGS * (_last_place(largest, dtype) + torch.finfo(dtype).eps * update)).clamp(min=_TINY)


def _turned(theirs: torch.Tensor, ours: torch.Tensor, allowed: torch.Tensor) -> bool:
    """Whether a square matrix is transposed, or both halves of one: gate and up of experts."""
    if ours.ndim < 2 or ours.shape[-2] not in (ours.shape[-1], 2 * ours.shape[-1]):
        return False
    halves = [one.split(ours.shape[-1], -2) for one in (theirs, ours, allowed)]
    return all(bool(((one.transpose(-1, -2) - own).abs() <= far).all()) for one, own, far in zip(*halves, strict=True))


def _last_place(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance of neighbouring numbers of a format around each value; of its smallest normal one below that."""
    limits = torch.finfo(dtype)
    _, exponent = torch.frexp(values.abs().clamp(min=limits.smallest_normal))
    return torch.ldexp(torch.full_like(values, limits.eps), exponent - 1)


def _findings(kinds: dict[str, list[tuple[str, float]]], adapted: int, model: Any) -> list[Finding]:
    """One finding for each way in which tensors differ."""
    found = []
    names = {kind: [name for name, _ in some] for kind, some in kinds.items()}
    if shapes := names.get("shape"):
        found.append(Finding("weights.shape", f"{len(shapes)} weights have another shape: {_first(shapes)}"))
    if turned := names.get("transposed"):
        found.append(Finding("weights.transposed", f"{len(turned)} weights are transposed: {_first(turned)}"))
    if of_base := names.get("base"):
        code = "weights.base" if len(of_base) == adapted else "weights.between"
        what = f"{len(of_base)} of {adapted} weights that were trained are the base model's: {_first(of_base)}"
        found.append(Finding(code, what))
    if scaled := kinds.get("scaled"):
        size = sum(one for _, one in scaled) / len(scaled)
        what = f"the update has {size:.2f} times its size in {len(scaled)} of {adapted} weights"
        found.append(Finding("weights.beyond" if size > 1 else "weights.between", what))
    if others := names.get("other"):
        embedded = {id(one.weight) for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one}
        places = {name for name, one in model.named_parameters(remove_duplicate=False) if id(one) in embedded}
        code = "weights.embeddings" if set(others) <= places else "weights.differ"
        found.append(Finding(code, f"{len(others)} weights differ: {_first(others)}"))
    if rounded := names.get("rounded"):
        what = f"{len(rounded)} weights are off by more than one rounding: {_first(rounded)}"
        found.append(Finding("weights.beyond_format", what))
    return found


def _of_adapters(reference: Path, target: FolderTarget) -> tuple[list[Finding], str]:
    """Settings and tensors of two adapters; a tensor for which peft makes no module counts as missing."""
    ours, theirs = read_json(reference / ADAPTER), read_json(target.folder / ADAPTER)
    changed = [
        f"{key} is {theirs.get(key)} instead of {ours.get(key)}" for key in _SCALES if ours.get(key) != theirs.get(key)
    ]
    found = [Finding("weights.beyond", ", ".join(changed))] if changed else []
    try:
        first, second = (load_file(folder / WEIGHTS) for folder in (reference, target.folder))
    except (OSError, SafetensorError):
        return found, f"one has no {WEIGHTS}"
    prefix = str(target.model.base_model.prefix)  # lora_
    used = get_peft_model_state_dict(target.model, save_embedding_layers=False).keys()
    second = {name: one for name, one in second.items() if prefix not in name or name in used}
    if more := sorted(second.keys() - first.keys()):
        found.append(Finding("weights.differ", f"{len(more)} tensors of another adapter: {_first(more)}"))
    if missing := sorted(first.keys() - second.keys()):
        what = f"{len(missing)} of {len(first)} tensors of the adapter are missing: {_first(missing)}"
        found.append(Finding("weights.between", what))
    other = [
        name
        for name in sorted(first.keys() & second.keys())
        if first[name].shape != second[name].shape or _judged(second[name], first[name].float(), None)[0] != "same"
    ]
    if other:
        what = f"{len(other)} of {len(first)} tensors of the adapter differ: {_first(other)}"
        found.append(Finding("weights.differ", what))
    return found, ""


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
