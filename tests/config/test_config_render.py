"""What is written out: resolved YAML, JSON Schema, the reference, the recipe with every key."""

# ruff: noqa: E501

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from halftune.config.load import LoadedConfig, load_config
from halftune.config.reading.yaml_source import parse
from halftune.config.render import inline, resolved_yaml
from halftune.config.render.docs import explained_yaml, markdown
from halftune.config.render.schema import json_schema
from halftune.config.shape import walk

ROOT = Path(__file__).resolve().parents[2]
Load = Callable[..., LoadedConfig]


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.name)
def test_resolved_yaml_loads_again_and_is_equal(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    loaded = load_config(recipe.relative_to(ROOT), ["training.adam_epsilon=1e-12", "logging.run_name=off"])
    text = resolved_yaml(loaded)
    path = tmp_path / "resolved.yaml"
    path.write_text(text, encoding="utf-8")
    again = load_config(path)
    assert again.run == loaded.run
    assert yaml.safe_load(text) == loaded.run.model_dump(mode="json"), "YAML 1.1 readers see the same values"
    assert "training" in text
    assert f"# {recipe.relative_to(ROOT)}:" in text
    rows = [row for row in text.split("\n") if "adam_epsilon" in row]
    assert rows[0].split() == ["adam_epsilon:", "1.0e-12", "#", "command", "line"]


def test_every_value_has_an_origin(load: Load, recipe_text: str) -> None:
    loaded = load(recipe_text, "data.train=[builtin:python-docs, {path: builtin:stdlib-text, samples: 3}]")
    values = [row for row in resolved_yaml(loaded).split("\n")[1:] if row and not row.rstrip().endswith(":")]
    assert all(row.rsplit("  # ", 1)[1] in ("default", "command line") or "x.yaml:" in row for row in values)
    assert loaded.origins["data.train[1].samples"] == "command line"
    assert set(loaded.origins.values()) >= {"default", "command line", "x.yaml:2"}


VALUES = [
    None, True, False, 0, -3, 2**70, 1e-8, 1e22, 0.1, 1.5e-300, "", "a", "no", "off", "null", "~", "1", "1e-4", "1.0", "010",
    " a", "a ", "a: b", "a #b", "#", "- a", "[x", "{x", "*a", "&a", "!a", "'", '"', "a\nb", "a\tb", "ä ✓ 中", "\u2028", "\x85",
    "\x07", "%", "@a", "=", "<<", "2024-01-01", "1:30", "\ud7ff", "\U0001f600", "True", "yes", "-", "?", "a\\b", "\ufeffx",
    [], ["a", 1, None], {"a": 1, "b c": "d: e"}, ["a, b"], {"k": ["x"]}, "x" * 500,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_inline_is_read_alike_by_everybody(value: Any) -> None:
    text = f"key: {inline(value)}\n"
    assert text.count("\n") == 1
    assert parse(text, "x").values == {"key": value}
    assert yaml.safe_load(text) == {"key": value}


def test_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8") == markdown(), (
        "run: halftune schema --markdown > docs/reference/config.md"
    )


def test_every_key_is_documented() -> None:
    text = markdown()
    for path, section, field, _ in walk():
        assert field.description, f"{section.__name__}.{path[-1]} has no string beside it"
        assert f"| `{path[-1]}` |" in text


def test_explained_recipe_loads_with_all_defaults(load: Load, recipe_text: str) -> None:
    text = explained_yaml()
    loaded = load(text)
    bare = load("model: {name_or_path: 'builtin:qwen2-tiny'}\ndata: {train: 'builtin:python-docs'}\n"
                "training: {output_dir: runs/my-run}\n")  # fmt: skip
    assert loaded.run == bare.run
    assert all(len(line) <= 120 for line in text.split("\n"))


# --- a small JSON Schema validator: just the keywords that our schema uses, so that a new one shows up here ---
CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "enum": lambda value, words: any(value == word and type(value) is type(word) for word in words),
    "minimum": lambda value, limit: not _number(value) or value >= limit,
    "maximum": lambda value, limit: not _number(value) or value <= limit,
    "exclusiveMinimum": lambda value, limit: not _number(value) or value > limit,
    "exclusiveMaximum": lambda value, limit: not _number(value) or value < limit,
    "minItems": lambda value, limit: not isinstance(value, list) or len(value) >= limit,
    "pattern": lambda value, argument: not isinstance(value, str) or re.search(argument, value) is not None,
    "const": lambda value, word: value == word and type(value) is type(word),
    "required": lambda value, names: not isinstance(value, dict) or set(names) <= value.keys(),
}
TYPES = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: _number(value),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
}
ANNOTATIONS = {"$schema", "$defs", "title", "description", "default", "discriminator"}


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def valid(value: Any, schema: Any, root: Any) -> bool:
    if schema is True:
        return True
    results = []
    for keyword, argument in schema.items():
        if keyword in ANNOTATIONS:
            continue
        if keyword == "$ref":
            results.append(valid(value, root["$defs"][argument.removeprefix("#/$defs/")], root))
        elif keyword in ("anyOf", "oneOf"):
            count = sum(valid(value, option, root) for option in argument)
            results.append(count == 1 if keyword == "oneOf" else count > 0)
        elif keyword == "type":
            results.append(TYPES[argument](value))
        elif keyword == "items":
            results += [valid(item, argument, root) for item in value] if isinstance(value, list) else []
        elif keyword == "properties":
            found = argument.keys() & value.keys() if isinstance(value, dict) else ()
            results += [valid(value[name], argument[name], root) for name in found]
        elif keyword == "additionalProperties":
            names = value.keys() - schema.get("properties", {}).keys() if isinstance(value, dict) else ()
            results += [argument is not False and valid(value[name], argument, root) for name in names]
        else:
            results.append(CHECKS[keyword](value, argument))
    return all(results)


def test_schema_accepts_what_the_loader_accepts(load: Load, recipe_text: str) -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for recipe in sorted((ROOT / "configs").rglob("*.yaml")):
        assert valid(parse(recipe.read_text(), "x").values, schema, schema), recipe.name
    assert valid(parse(explained_yaml(), "x").values, schema, schema)
    for change in (
        {"precision": {"compute": "bf16"}}, {"bf16": True}, {"attention": "sdpa"}, {"adapter": "none"},
        {"data": {"train": ["a", {"path": "b", "columns": {"prompt": "q"}}], "packing": False}},
        {"adapter": {"type": "lora", "target_modules": ["q_proj"], "modules_to_save": "lm_head"}},
    ):  # fmt: skip
        assert valid({**parse(recipe_text, "x").values, **change}, schema, schema), change


def test_schema_refuses_what_the_loader_refuses(recipe_text: str) -> None:
    schema, good = json_schema(), parse(recipe_text, "x").values
    assert valid(good, schema, schema)
    for change in (
        {"precision": "fp8"}, {"unknown": 1}, {"adapter": {"type": "lora", "rank": 0}}, {"adapter": {"rank": 8}},
        {"data": {}}, {"data": {"train": []}}, {"training": {"output_dir": 1}}, {"adapter": {"type": "none", "rank": 8}},
        {"training": {"output_dir": "x", "load_best": "yes"}}, {"training": {"output_dir": "x", "warmup_ratio": 1}},
    ):  # fmt: skip
        assert not valid({**good, **change}, schema, schema), change


def test_schema_names_every_key() -> None:
    schema = json_schema()
    for path, section, _, _ in walk():
        holder = schema if section.__name__ == "RunConfig" else schema["$defs"][section.__name__]
        assert path[-1] in holder["properties"]
