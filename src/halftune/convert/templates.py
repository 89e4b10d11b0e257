"""Chat templates of axolotl and LLaMA-Factory: which of ours renders the same text and trains the same tokens.

``tests/config/test_convert_templates.py`` compares the texts. A name that is missing here renders another text.
"""

from __future__ import annotations

import re
from typing import Any

from halftune.config.chat_templates import TemplateRow, find_template
from halftune.convert import images
from halftune.convert.draft import Draft, is_off, table

# Names there that render as ours: the text in axolotl, the frames in LLaMA-Factory.
AXOLOTL, LLAMA_FACTORY = (set(table("templates", framework)) for framework in ("axolotl", "llamafactory"))
# Models whose own template writes text of its own at the beginning of an answer: thoughts, or the name of a channel.
_OPENS = re.compile(r"gpt-oss|qwen3-[\d.]+b(-a[\d.]+b)?$|qwen3\.\d|smollm3|glm-4\.\d|deepseek-r1", re.IGNORECASE)
_MISTRAL = re.compile(
    r"(devstral|magistral|voxtral|mistral-small(?!-instruct-2409)|ministral-3|mistral-large-3)", re.IGNORECASE
)
_ANSWERS = ("sft", "dpo", "kto", "simpo", "orpo")  # methods that label answers
_OWN = re.compile(r"tokenizer_default(_fallback_\w+)?")
_THOUGHT = "the empty thought of an answer without one has labels here, and none there"


def axolotl_template(draft: Draft) -> None:
    """``chat_template`` and ``eot_tokens`` of a recipe whose sources are known."""
    key, asked = "chat_template", str(draft.take("chat_template") or "tokenizer_default")
    if any(draft.get(f"data.{kind}") for kind in ("images", "videos", "audio")):
        images.axolotl_template(draft, key, asked)
    elif unread := _unread(draft, key, asked):
        if key in draft.source:
            draft.none(key, unread)
    elif _OWN.fullmatch(asked):
        _own(draft, key)
    else:
        _named(draft, key, asked)


def _unread(draft: Draft, key: str, asked: str) -> str:
    """Why nothing renders by the key; what renders in its place is dealt with."""
    written = str(draft.left.get("chat_template_jinja") or "")
    if draft.get("method.type") == "pretrain" or not any(map(_renders, _sources(draft))):
        return "no source is rendered by a chat template"
    if _by_mistral(draft):
        draft.translated("tokenizer_use_mistral_common", "model.chat_template", "mistral_v7_tekken")
        draft.put("model.chat_template_kwargs", {"trim_answers": True})
        return "the tokenizer of mistral-common does not read it"
    if written.endswith((".jinja", ".j2")) and (asked == "jinja" or key not in draft.source):
        why = "an end of a turn that is not the tokenizer's EOS is trained here"
        _own_text(draft, "chat_template_jinja", written, why)
        return "chat_template_jinja holds"
    return ""


def _named(draft: Draft, key: str, asked: str) -> None:
    """A template that axolotl brings."""
    if asked not in AXOLOTL or (row := find_template(asked)) is None:
        _nearest(draft, key, asked)
    elif row.empty_think:
        _own_text(draft, key, asked, _THOUGHT)
    elif row.end == "{eos}" or row.end in _ends(draft):
        draft.translated(key, "model.chat_template", asked)
    else:
        _own_text(draft, key, asked, f"{row.end} is trained here; there, only if it is the tokenizer's EOS")


def _by_mistral(draft: Draft) -> bool:
    """Whether mistral-common renders plain texts, in the format of Mistral Small 3 and later."""
    name, plain = str(draft.get("model.name_or_path")), "think" not in str(draft.source.get("datasets"))
    newer = _MISTRAL.search(name) and not is_off(draft.source.get("tokenizer_use_mistral_common"))
    return bool(newer) and plain and draft.get("method.type") == "sft"


def _renders(source: dict[str, Any]) -> bool:
    return not source.get("prompt") and source.get("format") != "text"


def _ends(draft: Draft) -> set[str]:
    """Tokens that axolotl trains after an answer."""
    special = draft.source.get("special_tokens")
    eos = special.get("eos_token") if isinstance(special, dict) else None
    name = str(draft.get("model.name_or_path"))
    by_name = (token for pattern, token in table("templates", "eos").items() if re.search(pattern, name, re.IGNORECASE))
    known = eos or next(by_name, "")
    return {known, *map(str, draft.source.get("eot_tokens") or ())}


def _own(draft: Draft, key: str) -> None:
    """The tokenizer's own template: the text is the same, but not the labels of every model."""
    name = str(draft.get("model.name_or_path"))
    if _OPENS.search(name):
        why = "the template begins answers with text of its own, which has labels here, and none there"
        _own_text(draft, key, "", why)
    elif _ends(draft) <= {"<eos>", "<|endoftext|>"}:
        why = "the end of a turn is trained here, and not there: it is not the tokenizer's EOS"
        _own_text(draft, key, "", why)
    elif key in draft.source:
        draft.none(key, "the tokenizer's own template is the default")


def _own_text(draft: Draft, key: str, name: str, why: str) -> None:
    """Labels of supervised fine-tuning as there: of the texts, and of ends that are EOS or listed in ``eot_tokens``.

    Args:
        draft: the recipe.
        key: of the chat template.
        name: our chat template; empty for the tokenizer's own.
        why: what differs where labels are not chosen.
    """
    ours = "model.chat_template" if name else ""
    if draft.get("method.type") != "sft" or draft.get("method.train_on") == "all":
        draft.changed(key, ours, name, why)
        return
    draft.put("method.labels", "text")
    if ends := [str(one) for one in draft.source.get("eot_tokens") or ()]:
        draft.put("method.label_ends", ends)
    if name:
        draft.translated(key, ours, name, "method.labels: text")
    else:
        draft.none(key, "the tokenizer's own template is the default; its labels: method.labels: text")


def _nearest(draft: Draft, key: str, asked: str) -> None:
    row = find_template(asked)
    if row is not None:
        draft.changed(key, "model.chat_template", asked, "halftune's template of this name renders another text")
    else:
        why = "the tokenizer's own chat template renders conversations; see model.chat_template if it has none"
        draft.changed(key, "", None, why)


def llamafactory_template(draft: Draft, key: str = "template") -> None:
    """``template`` of a recipe whose sources are known."""
    if not draft.has(key):
        return
    asked = str(draft.take(key))
    row = find_template(asked) if asked in LLAMA_FACTORY else None
    if any(draft.get(f"data.{kind}") for kind in ("images", "videos", "audio")):
        _with_media(draft, key, row)
    elif row is None:
        _nearest(draft, key, asked)
    else:
        _framed(draft, key, asked, row)


def _framed(draft: Draft, key: str, asked: str, row: TemplateRow) -> None:
    """A template whose frames are those of ours."""
    if row.trim:
        draft.put("model.chat_template_kwargs", {"trim": False, "trim_system": False})
    if _line_break(row) and draft.get("method.type") in _ANSWERS:
        draft.put("method.train_line_break", True)
    why = "earlier answers keep their thoughts there, and each answer without one gets an empty one"
    differs = row.empty_think and not _single_turns(draft)
    draft.translated(key, "model.chat_template", asked, changed=why if differs else "")


def _with_media(draft: Draft, key: str, row: TemplateRow | None) -> None:
    """The model's own template writes the placeholders of images; the table says how its answers end."""
    own = "the model's own chat template renders conversations"
    if row is None or row.trim:
        draft.changed(key, "", None, own)
    elif row.empty_think or re.search("thinking", str(draft.get("model.name_or_path")), re.IGNORECASE):
        draft.changed(key, "", None, f"{own}, whose empty thoughts are others")
    else:
        if _line_break(row):
            draft.put("method.train_line_break", True)
        draft.none(key, "the model's own chat template")


def _line_break(row: TemplateRow) -> bool:
    return row.last is None and row.assistant.endswith("\n")


def _sources(draft: Draft) -> list[dict[str, Any]]:
    return [one for one in draft.get("data.train") or () if isinstance(one, dict)]


def _single_turns(draft: Draft) -> bool:
    """Whether all rows are one question and one answer: alpaca's without a history."""
    return all(one.get("format") == "alpaca" and "history" not in one.get("columns", {}) for one in _sources(draft))
