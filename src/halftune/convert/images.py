"""Recipes with images: which models are known by name, and what is the same there."""

from __future__ import annotations

import re
from typing import Any

from halftune.config.facts.media import IMAGE_FAMILIES, ImageFamily
from halftune.convert.draft import Draft, is_off

_TYPES = (
    (r"qwen-?2-?vl", "qwen2_vl"),
    (r"qwen-?2[._]5-?vl", "qwen2_5_vl"),
    (r"qwen-?3-?vl.*-a\d+b", "qwen3_vl_moe"),
    (r"qwen-?3-?vl", "qwen3_vl"),
    (r"qwen-?3[._][56].*-a\d+b", "qwen3_5_moe"),
    (r"qwen-?3[._][56]", "qwen3_5"),
    (r"glm-?4[._]6v-flash", "glm46v"),
    (r"glm-?4[._]1v-9b", "glm4v"),
    (r"paddleocr-?vl", "paddleocr_vl"),
    (r"gemma-?3-(4|12|27)b", "gemma3"),
    (r"llava-?1[._]5", "llava"),
    (r"llava-?(v?1[._]6|next)", "llava_next"),
    (r"idefics-?3", "idefics3"),
    (r"smolvlm", "smolvlm"),
    (r"internvl-?3.*-hf$", "internvl"),
    (r"gemma-?4-e\d+b", "gemma4"),
)
# Names of chat templates in axolotl that train the tokens of some roles only; with others, all texts have labels.
_MASKED = {
    "qwen2_vl", "qwen3_5", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "llama3_2_vision", "llama4", "pixtral",
    "mistral_v7_tekken",
}  # fmt: skip
# Of them, those that render the text of the model's own template.
OWN = {"qwen2_vl", "gemma3"}


def find_family(model: Any) -> ImageFamily | None:
    """How a model with this name takes images; None where its images are not trained, or the name is not known."""
    found = (kind for pattern, kind in _TYPES if re.search(pattern, str(model), re.IGNORECASE))
    return IMAGE_FAMILIES.get(next(found, ""))


def of_axolotl(draft: Draft, method: str) -> None:
    """``processor_type``: rows with images; parts are trained unless a key freezes them or LoRA leaves them out."""
    key = "processor_type"
    family = find_family(draft.get("model.name_or_path"))
    if is_off(draft.left.get(key)) or method or family is None:
        return
    _towers(draft, key)
    draft.drop({"skip_prepare_dataset": "rows with images are tokenised before training, too"})
    if family.two_way and draft.get("attention.backend") == "fa2":
        _without_flash(draft)
    if draft.left.get("image_size"):
        why = "the model's own processor decides sizes; there, images are first resized to one size"
        draft.changed("image_size", "", None, why)


def _towers(draft: Draft, key: str) -> None:
    """Images, by what the other framework would train of the towers."""
    targets = draft.get("adapter.target_modules")
    if draft.get("adapter.type") == "none":
        draft.translated(key, "data.images", True)
        if draft.left.get("freeze_mm_modules"):
            return
        if draft.get("adapter.train_only"):
            _unfrozen(draft)
        else:
            draft.put("model.train", {"vision": "full", "projector": "full"})
    elif _of_language(str(targets)):
        draft.translated(key, "data.images", True)
    elif targets == "all-linear":
        draft.translated(key, "data.images", True)
        draft.put("model.train", {"vision": "lora", "projector": "lora"})
    else:
        why = "layers of the vision tower stay as they are; there, those with the same names are adapted"
        draft.changed(key, "data.images", True, why)


_PROJECTOR = r"merger|projector|connector|embed_vision"
_VISION = r"vision|visual"


def _unfrozen(draft: Draft) -> None:
    """Patterns of ``unfrozen_parameters`` that name whole parts; the others stay those of the language model."""
    parts: dict[str, str] = {}
    rest = []
    for pattern in draft.get("adapter.train_only"):
        named = pattern.replace("\\", "")
        if not re.search(f"{_PROJECTOR}|{_VISION}", named):
            rest.append(pattern)
        elif re.fullmatch(
            rf"\^?(model\.)?(visual\.)?({_PROJECTOR}|multi_modal_projector)(_list)?\.?(\.?\*)?\$?", named
        ):
            parts["projector"] = "full"
        elif re.fullmatch(rf"\^?(model\.)?({_VISION})(_tower|_model)?\.?(\.?\*)?\$?", named):
            parts |= {"vision": "full"} | ({"projector": "full"} if "visual" in named else {})  # holds its merger
        else:
            draft.notes[:] = [note for note in draft.notes if note.key != "unfrozen_parameters"]
            draft.refused(
                "unfrozen_parameters", f"{named} is a piece of a tower: whole towers and projectors are trained"
            )
            return
    if parts and not rest:
        draft.values["adapter"].pop("train_only")
        draft.put("model.train", {"language": "frozen", **parts})
    elif parts:
        draft.put("adapter.train_only", rest)
        draft.put("model.train", parts)


def llamafactory_parts(draft: Draft) -> None:
    """LLaMA-Factory freezes towers and projector unless it is told otherwise, and trains the language model."""
    towers = [part for part, key in (("vision", "images"), ("audio", "audio")) if draft.get(f"data.{key}")]
    if not towers:
        return
    kind = str(draft.source.get("finetuning_type") or "lora")
    if draft.left.get("train_mm_proj_only"):
        draft.put("model.train.projector", "full")
        draft.translated("train_mm_proj_only", "model.train.language", "frozen")
    elif draft.left.get("freeze_language_model"):
        draft.translated("freeze_language_model", "model.train.language", "frozen")
    for key, parts in (("freeze_vision_tower", towers), ("freeze_multi_modal_projector", ["projector"])):
        if draft.left.get(key) is not False:
            continue
        if kind not in ("lora", "full"):
            draft.refused(key, f"finetuning_type: {kind} with other parts than the language model is not supported")
        elif kind == "lora" and parts == ["projector"]:
            draft.changed(key, "", None, "the projector stays as it is, as there unless lora_target names its layers")
        else:
            mode = "full" if kind == "full" else "lora"
            for part in parts:
                draft.put(f"model.train.{part}", mode)
            draft.translated(key, f"model.train.{parts[0]}", mode, _deepstack(draft))


def _deepstack(draft: Draft) -> str:
    named = re.search(r"qwen-?3-?vl", str(draft.get("model.name_or_path")), re.IGNORECASE)
    return "deepstack_merger_list is a part of the projector here, of the vision tower there" if named else ""


def _without_flash(draft: Draft) -> None:
    key = next(note.key for note in draft.notes if note.ours == "attention.backend")
    draft.notes[:] = [note for note in draft.notes if note.key != key]
    why = "tokens of an image attend to later ones, which FlashAttention 2 does not compute"
    draft.changed(key, "attention.backend", "sdpa", why)


def _of_language(targets: str) -> bool:
    """Whether a regular expression names layers of the language model, and of no tower."""
    return bool(re.search("language_model|text_model", targets)) and not re.search("vis(ion|ual)|projector", targets)


def length(draft: Draft) -> None:
    """Rows with images are never cut or dropped there."""
    why = "a longer row stops the run: then raise data.max_length; there, the length is not looked at"
    draft.translated("excess_length_strategy", "data.overlong", "error", why)


def labels(draft: Draft) -> None:
    """Which texts have labels, by the name of the chat template."""
    if str(draft.source.get("chat_template")) not in _MASKED:
        draft.values.setdefault("method", {}).pop("train_on", None)
        draft.default("method.train_on", "all", "labels (of all texts, with this chat template)")


def axolotl_template(draft: Draft, key: str, asked: str) -> None:
    """The model's own template writes the placeholders of images."""
    llava = asked == "llava" and re.search(r"llava-?1[._]5", str(draft.get("model.name_or_path")), re.IGNORECASE)
    if asked in OWN or asked == "tokenizer_default" or llava:
        draft.none(key, "the model's own chat template")
    else:
        draft.changed(key, "", None, "the model's own chat template renders conversations")


def pixels(draft: Draft) -> None:
    """LLaMA-Factory's bounds of an image's size."""
    draft.move("image_max_pixels", "data.image_max_pixels", int)
    draft.default("data.image_max_pixels", 768 * 768, "image_max_pixels")
    draft.move("image_min_pixels", "data.image_min_pixels", int)
    draft.default("data.image_min_pixels", 32 * 32, "image_min_pixels")
    draft.move("media_dir", "data.media_folder", str)
