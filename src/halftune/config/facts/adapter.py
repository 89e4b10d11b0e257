"""The config of an adapter that training starts from: its settings become those of the recipe's ``adapter``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halftune.config.facts.folder import read_json
from halftune.config.reading.dependencies import trained_by_dependency
from halftune.config.reading.names import HUB_ID, looks_local
from halftune.config.tree import Tree, child
from halftune.core.errors import ModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
AT = ("adapter", "name_or_path")
# Our key → peft's name and default.
KEYS: dict[str, tuple[str, Any]] = {
    "rank": ("r", 8),
    "alpha": ("lora_alpha", 8),
    "use_rslora": ("use_rslora", False),
    "use_dora": ("use_dora", False),
    "target_modules": ("target_modules", None),
    "modules_to_save": ("modules_to_save", None),
    "target_parameters": ("target_parameters", None),
}
# Keys of peft's config without an effect on what continues from the weights. Every other key with a value is refused by
# name: peft would read it as an option that changes the adapter's function.
IGNORED = {
    *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "inference_mode"),
    *("auto_mapping", "lora_dropout", "fan_in_fan_out", "ensure_weight_tying"),
    "exclude_modules",  # compared with the adapted modules when weights are loaded
    *("bias", "init_lora_weights", "corda_config", "eva_config", "loftq_config", "lora_ga_config"),  # looked at below
    *("megatron_core", "qalora_group_size"),  # of options that are keys of their own
}
_SHOWN = 80  # characters of a value in a message: someone else's file may hold megabytes
_TASKS = ("CAUSAL_LM", "SEQ_CLS", "SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
_MUTATES = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that change the base model


def adopt(tree: Tree, *, download: bool) -> None:
    """Complete the recipe's ``adapter`` section by the config of the adapter in ``adapter.name_or_path``.

    Differences and unsupported adapters are added to ``tree.problems``. An adapter that is neither a folder nor in the
    hub cache changes nothing. For an adapter that a dependency trains, the dependency's recipe is read instead.

    Args:
        tree: the recipe.
        download: whether to ask the hub.
    """
    section = tree.values.get("adapter")
    name = section.get("name_or_path") if isinstance(section, dict) else None
    if not isinstance(name, str):
        return
    try:
        settings = _settings(tree, name, download=download)
    except ModelError as error:
        tree.problems.append(tree.problem(AT, error.what, error.remedy, code=error.code))
        return
    for key, asked, stored in differences(section, settings):
        what = f"is {asked!r}, but the adapter in adapter.name_or_path has {stored!r}"
        remedy = "remove it: the adapter's config decides"
        tree.problems.append(tree.problem(("adapter", key), what, remedy, code="config.keys_conflict"))
    tree.values["adapter"] = {**settings, **section}


def _settings(tree: Tree, name: str, *, download: bool) -> dict[str, Any]:
    """The keys that the adapter's config decides, or the recipe that trains it; none if it is not here."""
    if (trained := trained_by_dependency(tree, name)) is not None:
        return {key: value for key in KEYS if (value := child(trained, "adapter", key)) is not None}
    file = config_of(name, download=download)
    return {} if file is None else settings_of(read_json(file), where=str(file))


def config_of(name: str, *, download: bool) -> Path | None:
    """Return the path of an adapter's config: in a folder, in the hub cache, or on the hub; None if not downloaded.

    Raises:
        ModelError: the folder has no adapter, or the hub cannot be reached.
    """
    folder = Path(name)
    if folder.is_dir():
        if (folder / CONFIG).is_file():
            return folder / CONFIG
        below = folder / "final"
        remedy = f"did you mean {below}?" if (below / CONFIG).is_file() else "use a folder with adapter_config.json"
        raise ModelError("the folder contains no adapter", where=name, remedy=remedy, code="model.adapter_missing")
    if looks_local(name) or not HUB_ID.fullmatch(name) or "/" not in name:
        what, remedy = f"no such folder: {name}", "use the folder of an adapter, such as runs/mine/final, or a hub id"
        raise ModelError(what, where=name, remedy=remedy, code="model.adapter_missing")
    from halftune.config.facts.config_file import from_hub  # few runs start from the hub

    return from_hub(name, None, CONFIG, key=".".join(AT), download=download)


def settings_of(raw: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return the keys of the section ``adapter`` that an adapter's config decides.

    Raises:
        ModelError: it is not LoRA, or has options that training cannot continue.
    """
    if wrong := _unsupported(raw):
        what = f"training cannot continue an adapter with {', '.join(wrong)}"
        remedy = "use a LoRA adapter with one rank and alpha"
        raise ModelError(what, where=where, remedy=remedy, code="model.adapter_unsupported")
    settings = {key: raw.get(name, default) for key, (name, default) in KEYS.items()}
    # written by save: linear layers with the names of experts
    stored = {str(one) for one in raw.get("target_parameters") or ()}
    linear = {one for one in stored if one.endswith(".weight")}
    if isinstance(settings["target_modules"], list) or linear:
        names = {one.removesuffix(".weight") for one in linear}
        settings["target_modules"] = sorted({*(settings["target_modules"] or ()), *names})
    settings["modules_to_save"] = sorted(settings["modules_to_save"] or ())
    settings["target_parameters"] = sorted(stored - linear)
    return settings


def _unsupported(raw: dict[str, Any]) -> list[str]:
    """Options of an adapter's config that training cannot continue, as ``key: value``."""
    kind, bias, start = raw.get("peft_type"), raw.get("bias", "none"), str(raw.get("init_lora_weights"))
    known = IGNORED.union(name for name, _ in KEYS.values())
    wrong = [f"{key[:_SHOWN]}: {str(value)[:_SHOWN]}" for key, value in raw.items() if value and key not in known]
    if kind != "LORA":
        wrong.insert(0, f"peft_type: {kind}")
    if bias != "none":
        wrong.append(f"bias: {bias}")
    if start.startswith(_MUTATES):
        wrong.append(f"init_lora_weights: {start}")
    return wrong + [f"{key}: {str(raw.get(key))[:_SHOWN]}" for key in _refused_by_peft(raw)]


def _refused_by_peft(raw: dict[str, Any]) -> Iterator[str]:
    """Keys whose values have no effect here, but which peft refuses."""
    if raw.get("task_type") not in (None, *_TASKS):
        yield "task_type"
    dropout = raw.get("lora_dropout", 0)
    if not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
        yield "lora_dropout"
    named = ("target_modules", "target_parameters", "modules_to_save", "exclude_modules")
    if odd := [key for key in named if not isinstance(raw.get(key) or [], str | list)]:
        yield from odd
        return
    targets, parameters = raw.get("target_modules") or [], map(str, raw.get("target_parameters") or ())
    linear = [one.removesuffix(".weight") for one in parameters if one.endswith(".weight")]
    twice = (f".{one}".endswith(f".{name}") for one in linear for name in targets)
    if linear and (isinstance(targets, str) or any(twice)):
        yield "target_parameters"


def differences(section: dict[str, Any], settings: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key that the recipe sets to another value, its value there and in the adapter's config.

    ``all-linear`` is compared when weights are loaded.
    """
    for key, stored in settings.items():
        asked = section.get(key, stored)
        if isinstance(stored, list) and isinstance(asked, list | tuple):
            asked, stored = sorted(map(str, asked)), sorted(stored)
        if isinstance(stored, list) and isinstance(asked, str):
            asked = "all-linear" if asked == "all-linear" else [asked] if key == "modules_to_save" else asked
        if asked not in (stored, "all-linear"):
            yield key, asked, stored
