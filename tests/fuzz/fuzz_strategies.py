"""What is thrown at halftune: odd values, trees that nearly fit the schema, damaged bytes and damaged JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel

from halftune.config.run import RunConfig

TEXTS = (
    "",
    " ",
    "\0",
    "é\u2028x",
    "a" * 5000,
    "builtin:",
    "builtin:qwen2-tiny",
    "../..",
    "~",
    "~nobody/x",
    "/",
    ".",
    "$HOME",
    "*",
    "[",
    "{{",
    "{% for x in y %}",
    "true",
    "null",
    "1e400",
    "-0",
    "<|im_end|>",
    "org/name",
    "https://x/y",
    "C:\\x",
    "\U000f5000",
    "auto",
    "user",
    "assistant",
    "\x1b[31m",
    "%s",
    "(?P<a>",
    "a,b",
    "all-linear",
    "\ufeff",
    "0x10",
    "1:30",
    "2020-01-01",
)
NUMBERS = (0, 1, -1, 2, 7, 64, 2**31, 2**63, 2**64, 10**30, 0.5, 1.0, -0.0, 1e-300, 1e308, float("nan"), float("inf"))

texts = st.sampled_from(TEXTS) | st.text(max_size=12)
leaves = st.none() | st.booleans() | st.sampled_from(NUMBERS) | texts
odd = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _sections(part)]


def _words(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [found for part in get_args(annotation) for found in _words(part)]


def values_of(annotation: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that a field may have, and odd ones."""
    choices = [odd, st.sampled_from(NUMBERS), st.booleans()]
    if words := _words(annotation):
        choices += [st.sampled_from(words)] * 3
    if depth < 4:
        for section in _sections(annotation):
            made = trees_of(section, depth + 1)
            choices += [made, made, st.lists(made, max_size=2)]
    return st.one_of(choices)


def plausible(annotation: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values of the right kind, so that the rules behind the types are asked, and the plan is made."""
    if annotation in _PLAUSIBLE:
        return _PLAUSIBLE[annotation]
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return st.sampled_from(parts)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if depth > 2:
            return st.just({})
        fields = annotation.model_fields.items()
        values = {name: plausible(field.annotation, depth + 1) for name, field in fields}
        needed = {name: values.pop(name) for name, field in fields if field.is_required()}
        # few keys at a time: each more makes it likelier that two of them exclude each other
        some = st.lists(st.sampled_from(sorted(values)), max_size=2, unique=True) if values else st.just([])
        return some.flatmap(lambda names: st.fixed_dictionaries({**needed, **{name: values[name] for name in names}}))
    if get_origin(annotation) in (list, tuple):
        return st.lists(plausible(parts[0], depth + 1), max_size=2)
    if get_origin(annotation) is dict:
        return st.dictionaries(st.sampled_from(("x", "enable_thinking")), st.booleans(), max_size=1)
    inner = parts[:1] if get_origin(annotation) is Annotated else parts
    return st.one_of([plausible(part, depth) for part in inner]) if inner else odd


def trees_of(section: type[BaseModel], depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    """Dicts whose keys are mostly the section's."""
    fields = {name: values_of(field.annotation, depth) for name, field in section.model_fields.items()}
    return st.fixed_dictionaries({}, optional=fields) | st.dictionaries(
        st.sampled_from(sorted(fields)) | texts, odd, max_size=4
    )


_PLAUSIBLE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.sampled_from((0, 1, 2, 3, 8, 64)),
    float: st.sampled_from((0.0, 1e-5, 0.1, 0.5, 1.0, 2.5)),
    str: st.sampled_from(("builtin:llama-tiny", "builtin:python-docs", "rows.jsonl", "q_proj", "all-linear", "a")),
    type(None): st.none(),
}
recipes = trees_of(RunConfig)
# A tree that is right, with some keys replaced: most of the rules between keys are asked.
GOOD: dict[str, Any] = {
    "model": {"name_or_path": "builtin:qwen2-tiny"},
    "data": {"train": "rows.jsonl", "max_length": 64},
    "training": {"output_dir": "run", "max_steps": 1},
}


def _mostly(first: st.SearchStrategy[Any], second: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 3).flatmap(lambda number: second if number == 3 else first)


@st.composite
def nearly_right(draw: st.DrawFn) -> dict[str, Any]:
    """The good recipe with one to three fields set to something."""
    tree = {name: dict(section) for name, section in GOOD.items()}
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(RunConfig.model_fields)))
        field = RunConfig.model_fields[name]
        sections = _sections(field.annotation)
        if sections and draw(st.integers(0, 4)):
            inner = draw(st.sampled_from(sections))
            key = draw(st.sampled_from(sorted(inner.model_fields)))
            holder = tree.setdefault(name, {"type": "lora"} if name == "adapter" else {})
            if isinstance(holder, dict):
                annotation = inner.model_fields[key].annotation
                holder[key] = draw(_mostly(plausible(annotation, 2), values_of(annotation, 3)))
        else:
            tree[name] = draw(_mostly(plausible(field.annotation, 1), values_of(field.annotation, 2)))
    return tree


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """One to four edits of bytes: flipped, deleted, inserted, repeated, cut off."""
    edits = draw(
        st.lists(
            st.tuples(
                st.sampled_from(("flip", "delete", "insert", "repeat", "cut")),
                st.floats(0, 1, exclude_max=True),
                st.integers(1, 40),
                st.binary(min_size=1, max_size=8) | st.sampled_from(TEXTS[:12]).map(lambda text: text.encode()),
            ),
            min_size=1,
            max_size=4,
        )
    )

    def damage(raw: bytes) -> bytes:
        for how, place, length, new in edits:
            at = int(place * (len(raw) + 1))
            match how:
                case "flip" if at < len(raw):
                    raw = raw[:at] + bytes([raw[at] ^ (1 << length % 8)]) + raw[at + 1 :]
                case "delete":
                    raw = raw[:at] + raw[at + length :]
                case "insert":
                    raw = raw[:at] + new + raw[at:]
                case "repeat":
                    raw = raw[:at] + raw[at : at + length] * 2 + raw[at + length :]
                case "cut":
                    raw = raw[:at]
        return raw

    return damage


@st.composite
def json_damages(draw: st.DrawFn) -> Callable[[Any], Any]:
    """Replaces or removes one to three values somewhere in a JSON tree."""
    edits = draw(
        st.lists(
            st.tuples(st.lists(st.integers(0, 63), min_size=2, max_size=6), odd | st.just(...)), min_size=1, max_size=3
        )
    )

    def damage(tree: Any) -> Any:
        tree = json.loads(json.dumps(tree))
        for steps, value in edits:
            _replace(tree, steps, value)
        return tree

    return damage


def _replace(tree: Any, steps: list[int], value: Any) -> None:
    for number, step in enumerate(steps):
        if not isinstance(tree, dict | list) or not tree:
            return
        key = list(tree)[step % len(tree)] if isinstance(tree, dict) else step % len(tree)
        inner = tree[key]
        if number == len(steps) - 1 or not isinstance(inner, dict | list) or not inner:
            if value is ...:
                del tree[key]
            else:
                tree[key] = value
            return
        tree = inner


_contents = st.sampled_from(("a", "", "b\n", "<|im_end|>", "é")) | st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(("text", "image")), "text": texts}), max_size=2
)
_calls = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": texts, "arguments": odd})}), max_size=2
)
_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant", "system", "tool")), "content": _mostly(_contents, odd)},
    optional={"train": st.booleans() | odd, "tool_calls": _mostly(_calls, odd), "thinking": texts},
)
conversations = st.fixed_dictionaries(
    {"messages": st.lists(_mostly(_messages, _mostly(_messages, odd)), min_size=1, max_size=4)},
    optional={"tools": st.lists(st.fixed_dictionaries({"name": texts, "parameters": odd}), max_size=2) | odd},
)
