"""Translates the data sets of an axolotl config, and which of their tokens are trained."""

from __future__ import annotations

from typing import Any

from halftune.convert import images, preference
from halftune.convert.draft import Draft, listed, misspelt, not_taken, table
from halftune.convert.templates import axolotl_template
from halftune.convert.trainer import grouping

LABELS, TYPES = table("axolotl", "labels"), table("axolotl", "types")
READ = {*table("axolotl", "read"), *LABELS}
USUAL = {"text": ("text",), "messages": ("messages", "conversations"), "tools": ("tools",)}
ANSWERS = {"gpteacher": "response"}  # column of the answer, where it is not alpaca's
REASONING = ("reasoning_content", "reasoning", "thinking")  # columns of a message that are found by themselves
SPEAKERS = (("role", "content"), ("from", "value"))
ROLES = {"user": {"user", "human"}, "assistant": {"assistant", "gpt"}, "system": {"system"}, "tool": {"tool"}}


def data(draft: Draft, method: str) -> None:
    """``datasets``, ``test_datasets`` and ``pretraining_dataset``, and what is trained of them."""
    pretrain = bool(_sources(draft, "pretraining_dataset", "data.train"))
    sources = [*_sources(draft, "datasets", "data.train"), *_sources(draft, "test_datasets", "data.eval")]
    _labels(draft)
    if method:
        draft.drop("train_on_inputs", "answers are compared")
    else:
        _learned(draft, sources, pretrain=pretrain)
    if draft.get("data.images") or draft.get("data.audio"):
        images.labels(draft)
        images.length(draft)
    axolotl_template(draft)
    draft.follow("axolotl.data")
    grouping(draft)


def _learned(draft: Draft, sources: list[dict[str, Any]], *, pretrain: bool) -> None:
    """Documents or conversations, and which of their tokens."""
    kinds = {pretrain or source.get("format") == "text" for source in sources}
    if len(kinds) > 1:
        why = "some sources are type completion, where every token is trained, and some hold conversations"
        raise draft.refuse("datasets", f"{why}; halftune trains one kind in a run: make a recipe of each")
    if pretrain or True in kinds:
        draft.put("method.type", "pretrain")
        draft.follow("axolotl.pretrain")
        return
    draft.put("method.type", "sft")
    draft.follow("axolotl.eaft")
    if draft.get("method.loss"):
        draft.put("method.eaft_scale", 1.0)
    if draft.left.get("train_on_inputs") and not all(source.get("prompt") for source in sources):
        why = "headers of turns have labels too; there, only the texts and the ends of turns"
        draft.changed("train_on_inputs", "method.train_on", "all", why)
    draft.follow("axolotl.inputs")


def _sources(draft: Draft, key: str, ours: str) -> list[dict[str, Any]]:
    """Translates a list of data sets; returns our sources."""
    entries = draft.take(key)
    if not entries:
        return []
    method = draft.get("method.type") or ""  # of a preference method
    template = draft.source.get("chat_template")
    single = [entries] if isinstance(entries, str | dict) else entries
    read = [_source(one, method) for entry in single for one in _files(entry, template)]
    sources, notes = [source for source, _ in read], [note for _, note in read if note]
    draft.translated(key, ours, sources, changed="; ".join(dict.fromkeys(notes)))
    return sources


def _labels(draft: Draft) -> None:
    """Refuses data sets whose trained rows or tokens would be others here, or whose keys are misspelt."""
    entries = [entry for entry in draft.source.get("datasets") or [] if isinstance(entry, dict)]
    for key, (here, why) in LABELS.items():
        if any(entry.get(key) not in (None, *here) for entry in entries):
            draft.refused(key, why)
    for key in sorted(set[str]().union(*entries) - READ):
        if near := misspelt(key, READ):
            draft.refused(key, f"not a key of a data set: did you mean {near}?")
    _check_types(draft, [entry.get("type") for entry in entries])


def _check_types(draft: Draft, kinds: list[Any]) -> None:
    if draft.get("method.type") == "grpo" and any("." in str(kind) for kind in kinds):
        draft.refused("type", "a function writes the rows there: save them as prompts, with the columns of the rewards")
    elif not all(kinds):
        draft.refused("type", "a data set without a type holds tokens and labels; halftune reads texts only")
    elif "input_output" in kinds:
        draft.refused("type", "input_output marks parts of a text; halftune trains whole answers")


def _source(entry: Any, method: str) -> tuple[dict[str, Any], str]:
    """One data set: (our source, what changed)."""
    if not isinstance(entry, dict):
        return {"path": str(entry)}, ""
    path = str(entry.get("data_files") or entry.get("path"))
    path += f":{entry['name']}" if entry.get("name") else ""
    kind = _type(entry)
    form, prompt = TYPES.get(kind, ("", ""))
    change = "" if kind in TYPES else f"type {kind}: the format is found from the columns"
    split = None if entry.get("ds_type") else entry.get("split")
    source = {
        "path": path,
        "split": "" if split == "train" else split,
        "format": form,
        "prompt": prompt,
        "columns": _columns(entry, kind),
        "drop_system": bool(entry.get("drop_system_message")),
    }
    if method in preference.FORMATS:
        source, change = preference.axolotl_source(entry, source, method)
    changes = "; ".join(filter(None, [change, *_left_out(entry)]))
    return {key: value for key, value in source.items() if value}, changes


def _files(entry: Any, template: Any) -> list[Any]:
    """A data set of several files as one of each, without a chat template that is that of all, and usual roles."""
    if not isinstance(entry, dict):
        return [entry]
    entry = dict(entry)
    if str(entry.get("chat_template") or "tokenizer_default") == str(template or "tokenizer_default"):
        entry.pop("chat_template", None)
    if _usual(entry.get("roles")):
        entry.pop("roles")
    files = entry.get("data_files")
    return [entry | {"data_files": one} for one in files] if isinstance(files, list) and files else [entry]


def _usual(roles: Any) -> bool:
    """Whether names of roles are those that are found by themselves."""
    return isinstance(roles, dict) and all(
        set(listed(names or [])) <= ROLES.get(role, set()) for role, names in roles.items()
    )


def _type(entry: dict[str, Any]) -> str:
    kind = entry.get("type") or ""
    return kind.partition("\n")[0] if isinstance(kind, str) else "of its own"


def _columns(entry: dict[str, Any], kind: str) -> dict[str, Any]:
    """Columns with other names than those that are found by themselves."""
    given = {"tools": entry.get("field_tools")}
    if kind == "completion":
        given["text"] = entry.get("field")
    elif TYPES.get(kind, ("", ""))[1]:
        return {"output": ANSWERS[kind]} if kind in ANSWERS else {}
    else:
        given["messages"] = entry.get("field_messages")
    return {ours: theirs for ours, theirs in given.items() if theirs and theirs not in USUAL[ours]}


def _left_out(entry: dict[str, Any]) -> list[str]:
    """What a data set says that has no place in ours."""
    said = entry.get("message_property_mappings") or {}
    role = said.get("role", entry.get("message_field_role") or "role")
    content = said.get("content", entry.get("message_field_content") or "content")
    found = {key for key in ("field_thinking", "template_thinking_key") if entry.get(key) in REASONING}
    turns = "messages hold role and content, or from and value, here"
    left = [] if (role, content) in SPEAKERS else [f"{role}, {content}: {turns}"]
    unread = (
        not_taken(entry, READ | found),
        not_taken(said, {"role", "content", *(key for key in said if said[key] == key)}),
    )
    return left + [one for one in unread if one]
