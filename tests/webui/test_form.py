"""The form is the schema: every field has a row, every row a field, every change the text that a person would write."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from halftune.config.recipes import recipes
from halftune.config.shape import walk
from halftune_webui.labels import load_words
from halftune_webui.recipes.edits import add_entry, change, path_of, remove_entry
from halftune_webui.recipes.form import COMMON, form, shown
from halftune_webui.recipes.yaml_edit import read
from halftune_webui.settings import LANGUAGES
from halftune_webui.tabs import TABS

ROOM = Path(__file__).resolve().parents[2] / "webui" / "halftune_webui"
RECIPE = (
    "model: {name_or_path: builtin:qwen2-tiny}\ndata: {train: builtin:python-docs}\ntraining: {output_dir: runs/x}\n"
)


def rows() -> set[str]:
    found = set()
    for group in form():
        for row in group.rows:
            found |= {f"{row.path}.{inner.path}" for inner in row.rows} or {row.path}
    return found


def test_every_field_of_the_schema_has_one_row() -> None:
    keys = [
        ".".join(str(part) for part in path if not isinstance(part, int))
        for path, _, _, shape in walk()
        if not shape.sections
    ]
    assert rows() == set(keys)
    listed = [row.path for group in form() for row in group.rows]
    assert len(listed) == len(set(listed))
    assert set(COMMON) <= set(listed)


def test_help_is_the_fields_own() -> None:
    rank = next(row for group in form() for row in group.rows if row.path == "adapter.rank")
    assert rank.help == "Rank r of the update B·A."
    assert rank.when == ("adapter.type", "lora", "vera", "loha", "lokr")


@pytest.mark.parametrize(
    ("field", "written", "value"),
    [
        ("training.learning_rate", "1e-4", 1e-4),
        ("training.learning_rate", "fast", "fast"),
        ("training.eval_steps", "10", 10),
        ("training.eval_steps", "epoch", "epoch"),
        ("training.gradient_checkpointing", "true", True),
        ("training.gradient_checkpointing", "auto", "auto"),
        ("data.packing.enabled", "false", False),
        ("data.cache", False, False),
        ("data.system", "12", "12"),
        ("data.system", "yes: no # x", "yes: no # x"),
        ("adapter.target_modules", "q_proj\nv_proj", ["q_proj", "v_proj"]),
        ("adapter.target_modules", ".*_proj", ".*_proj"),
        ("adapter.modules_to_save", "lm_head", ["lm_head"]),
        ("logging.report_to", ["wandb"], ["wandb"]),
        ("model.chat_template_kwargs", "enable_thinking: false\nn: 3", {"enable_thinking": False, "n": 3}),
        ("data.train[0].columns", "prompt: q", {"prompt": "q"}),
    ],
)
def test_a_field_writes_what_a_person_would(field: str, written: str | bool | list[str], value: object) -> None:
    values = read(change(RECIPE, field, written)).values
    for part in path_of(field):
        values = values[part]
    assert values == value
    assert type(values) is type(value)


@pytest.mark.parametrize("field", sorted(rows()))
def test_emptied_field_is_gone(field: str) -> None:
    if field.startswith(("data.train.", "data.eval.")) or field.endswith(".type"):
        return
    assert field not in dict(shown(read(change(change(RECIPE, field, "auto"), field, "")).values))


def test_another_variant_drops_the_keys_it_does_not_know() -> None:
    text = RECIPE + "adapter:\n  type: lora   # small\n  rank: 4\n  alpha: 8\n"
    changed = change(text, "adapter.type", "none")
    assert read(changed).values["adapter"] == {"type": "none"}
    assert "# small" in changed
    assert read(change(changed, "adapter.type", "lora")).values["adapter"] == {"type": "lora"}


def test_entries_come_and_go() -> None:
    two = change(add_entry(RECIPE, "data.train"), "data.train[1].path", "b.jsonl")
    assert read(two).values["data"]["train"] == [{"path": "builtin:python-docs"}, {"path": "b.jsonl"}]
    one = remove_entry(two, "data.train[0]")
    assert read(one).values["data"]["train"] == [{"path": "b.jsonl"}]
    evaluated = add_entry(one, "data.eval")
    assert read(evaluated).values["data"]["eval"] == [{"path": ""}]
    assert "eval" not in read(remove_entry(evaluated, "data.eval[0]")).values["data"]


def test_languages_have_the_same_labels() -> None:
    tables = [
        {key for key in load_words(language).table if not key.startswith(("fields.", "help."))}
        for language in LANGUAGES
    ]
    assert tables[0] == tables[1]
    assert {f"tabs.{name}" for name in TABS} <= tables[0]
    for language in LANGUAGES:
        assert all(load_words(language).table.values())
        assert set(load_words(language).below("recipes")) <= {path.stem for path in recipes().values()}


def test_translated_fields_exist() -> None:
    known = rows() | {row.path for group in form() for row in group.rows} | {group.name for group in form()}
    for language in LANGUAGES:
        words = load_words(language)
        assert {*words.below("fields"), *words.below("help")} <= known


def test_every_field_speaks_chinese() -> None:
    """A new field asks for two lines in labels/zh.yaml; English has the schema's own names and texts."""
    words = load_words("zh")
    listed = rows() | {group.name for group in form()} - {"common"}
    assert listed - set(words.below("help")) == set()
    assert rows() - set(words.below("fields")) == set()
    assert {group.name for group in form()} <= set(words.below("groups"))


LABELS = {"label", "info", "placeholder", "value", "title", "description", "lines_label", "show_label"}


@pytest.mark.parametrize("path", sorted((ROOM / "tabs").glob("*.py")), ids=lambda path: path.name)
def test_no_tab_has_words_of_its_own(path: Path) -> None:
    """What a component shows comes from the labels: no literal with letters is handed to one."""
    said = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "gr"):
            continue
        shown_first = node.args[:1] if node.func.attr in ("Button", "Markdown", "Tab", "Warning", "Info") else []
        for value in [*shown_first, *(word.value for word in node.keywords if word.arg in LABELS)]:
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and any(map(str.isalpha, value.value)):
                said.append(f"line {value.lineno}: {value.value!r}")
    assert not said
