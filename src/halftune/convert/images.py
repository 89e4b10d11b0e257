"""Recipes with images: which models are known by name, and what is the same there."""

from __future__ import annotations

import re
from typing import Any

from halftune.config.facts.media import IMAGE_FAMILIES, ImageFamily
from halftune.convert.draft import Draft, is_off, table

_PROJECTOR = r"merger|projector|connector|embed_vision"
_VISION = r"vision|visual"
ADAPTED = "; there, those with the same names are adapted"


def find_family(model: Any) -> ImageFamily | None:
    """How a model with this name takes images; None where its images are not trained, or the name is not known."""
    for pattern, kind in table("media", "images").items():
        if re.search(pattern, str(model), re.IGNORECASE):
            return IMAGE_FAMILIES.get(kind)
    return None


def of_axolotl(draft: Draft, method: str) -> None:
    """``processor_type``: rows with images; parts are trained unless a key freezes them or LoRA leaves them out."""
    key, family = "processor_type", find_family(draft.get("model.name_or_path"))
    if is_off(draft.left.get(key)) or method or family is None:
        return
    how, why = towers_of_axolotl(draft), "layers of the vision tower stay as they are"
    draft.translated(key, "data.images", True, changed=f"{why}{ADAPTED}" if how == "some" else "")
    if how == "full" and draft.get("adapter.train_only"):
        _unfrozen(draft)
    elif how in ("full", "lora"):
        draft.put("model.train", {"vision": how, "projector": how})
    draft.follow("media.of_axolotl")
    if family.two_way and draft.get("attention.backend") == "fa2":
        _without_flash(draft)


def towers_of_axolotl(draft: Draft) -> str:
    """How axolotl trains towers: ``full``, ``lora``, not at all: "", or ``some`` of their layers by LoRA."""
    targets = str(draft.get("adapter.target_modules"))
    if draft.get("adapter.type") == "none":
        return "" if draft.left.get("freeze_mm_modules") else "full"
    if re.search("language_model|text_model", targets) and not re.search("audio|vis(ion|ual)|projector", targets):
        return ""
    return "lora" if targets == "all-linear" else "some"


def _unfrozen(draft: Draft) -> None:
    """Patterns of ``unfrozen_parameters`` that name whole parts; the others stay those of the language model."""
    parts: dict[str, str] = {}
    rest = []
    for pattern in draft.get("adapter.train_only"):
        named = pattern.replace("\\", "")
        if not re.search(f"{_PROJECTOR}|{_VISION}", named):
            rest.append(pattern)
        elif found := _parts(named):
            parts |= dict.fromkeys(found, "full")
        else:
            draft.forget("unfrozen_parameters")
            why = f"{named} is a piece of a tower: whole towers and projectors are trained"
            draft.refused("unfrozen_parameters", why)
            return
    if not parts:
        return
    if rest:
        draft.put("adapter.train_only", rest)
    else:
        draft.values["adapter"].pop("train_only")
        parts = {"language": "frozen", **parts}
    draft.put("model.train", parts)


def _parts(name: str) -> tuple[str, ...]:
    """The parts that a pattern names as a whole."""
    if re.fullmatch(rf"\^?(model\.)?(visual\.)?({_PROJECTOR}|multi_modal_projector)(_list)?\.?(\.?\*)?\$?", name):
        return ("projector",)
    if re.fullmatch(rf"\^?(model\.)?({_VISION})(_tower|_model)?\.?(\.?\*)?\$?", name):
        return ("vision", "projector") if "visual" in name else ("vision",)  # visual holds its merger
    return ()


def llamafactory_parts(draft: Draft) -> None:
    """LLaMA-Factory freezes towers and projector unless it is told otherwise, and trains the language model."""
    draft.follow("media.parts")
    towers = {"data.images": "vision", "data.videos": "vision", "data.audio": "audio"}
    groups = {
        "freeze_vision_tower": [*dict.fromkeys(part for key, part in towers.items() if draft.get(key))],
        "freeze_multi_modal_projector": ["projector"],
    }
    kind = str(draft.source.get("finetuning_type") or "lora")
    for key, parts in groups.items():
        if draft.left.get(key) is not False:
            continue
        if kind not in ("lora", "full"):
            draft.refused(key, f"finetuning_type: {kind} with other parts than the language model is not supported")
        elif kind == "lora" and parts == ["projector"]:
            draft.changed(key, "", None, "the projector stays as it is, as there unless lora_target names its layers")
        else:
            for part in parts:
                draft.put(f"model.train.{part}", kind)
            draft.translated(key, f"model.train.{parts[0]}", kind, _deepstack(draft))


def _deepstack(draft: Draft) -> str:
    named = re.search(r"qwen-?3-?vl", str(draft.get("model.name_or_path")), re.IGNORECASE)
    return "deepstack_merger_list is a part of the projector here, of the vision tower there" if named else ""


def _without_flash(draft: Draft) -> None:
    key = next(note.key for note in draft.notes if note.ours == "attention.backend")
    draft.forget(key)
    why = "tokens of an image attend to later ones, which FlashAttention 2 does not compute"
    draft.changed(key, "attention.backend", "sdpa", why)


def length(draft: Draft) -> None:
    """Rows with images are never cut or dropped there."""
    why = "a longer row stops the run: then raise data.max_length; there, the length is not looked at"
    draft.translated("excess_length_strategy", "data.overlong", "error", why)


def labels(draft: Draft) -> None:
    """Which texts have labels, by the name of the chat template."""
    if str(draft.source.get("chat_template")) not in table("templates", "axolotl_masked"):
        draft.values.setdefault("method", {}).pop("train_on", None)
        draft.default("method.train_on", "all", "labels (of all texts, with this chat template)")


def axolotl_template(draft: Draft, key: str, asked: str) -> None:
    """The model's own template writes the placeholders of images."""
    llava = asked == "llava" and re.search(r"llava-?1[._]5", str(draft.get("model.name_or_path")), re.IGNORECASE)
    if asked in table("templates", "axolotl_own") or asked == "tokenizer_default" or llava:
        draft.none(key, "the model's own chat template")
    else:
        draft.changed(key, "", None, "the model's own chat template renders conversations")
