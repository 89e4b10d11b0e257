"""A recipe of the browser: the words of the command line, and the web UI's limits."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from halftune.config.load import load_config
from halftune.config.recipes import recipes
from halftune.config.shape import accepts, walk
from halftune.config.tree import dotted
from halftune.core.errors import ConfigError
from halftune_webui.labels import load_words
from halftune_webui.recipes.dependencies import needless, without_needless
from halftune_webui.recipes.edits import edited
from halftune_webui.recipes.recipe import examine, paths_of, shipped
from halftune_webui.recipes.state import form_state
from halftune_webui.recipes.yaml_edit import read
from halftune_webui.settings import Settings

GOOD = "model: {name_or_path: builtin:qwen2-tiny}\ndata: {train: builtin:python-docs}\ntraining: {output_dir: runs/x}\n"


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    folder = (tmp_path / "work").resolve()
    folder.mkdir()
    monkeypatch.chdir(folder)
    return Settings((folder,), folder / "runs")


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("runs/x}", "runs/x, learning_rate: fast, epochs: 3}"),
        GOOD + "precision: fp32\nattention: fa2\n",
        GOOD + "adapter: {type: lorra}\n",
        "model: [\n",
        "a: 1\n",
        GOOD + "training: {output_dir: y}\n",
        GOOD.replace("builtin:python-docs", "not/there.jsonl"),
    ],
)
def test_problems_are_those_of_the_command_line(limits: Settings, text: str) -> None:
    Path("recipe.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config("recipe.yaml")
    assert "\n".join(str(problem) for problem in examine(text, limits).problems) == str(refused.value)


@pytest.mark.parametrize("name", sorted(recipes()))
def test_shipped_recipes_stand_anywhere(limits: Settings, name: str) -> None:
    examined = examine(shipped(name), limits)
    assert not examined.problems
    assert examined.loaded is not None


def outside(text: str, limits: Settings) -> list[str]:
    examined = examine(text, limits)
    assert examined.loaded is None
    return [str(problem) for problem in examined.problems]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("model.name_or_path", GOOD.replace("builtin:qwen2-tiny", "/etc")),
        ("model.tokenizer", GOOD.replace("qwen2-tiny}", "qwen2-tiny, tokenizer: ../x}")),
        ("model.chat_template", GOOD.replace("qwen2-tiny}", "qwen2-tiny, chat_template: /etc/passwd}")),
        ("data.train[0].path", GOOD.replace("builtin:python-docs", "/etc/passwd")),
        ("data.train[1].path", GOOD.replace("builtin:python-docs", "[builtin:python-docs, {path: ../y}]")),
        ("data.eval[0].path", GOOD.replace("python-docs}", "python-docs, eval: ~/z.jsonl}")),
        ("adapter.name_or_path", GOOD + "adapter: {type: lora, name_or_path: /etc}\n"),
        ("data.media_folder", GOOD.replace("python-docs}", "python-docs, media_folder: /etc}")),
        ("training.output_dir", GOOD.replace("runs/x", "../runs")),
        ("training.resume", GOOD.replace("runs/x}", "runs/x, resume: /tmp}")),
        ("depends_on[0]", GOOD + "depends_on: [/etc/passwd]\n"),
    ],
)
def test_paths_outside_are_refused_and_nothing_is_read(limits: Settings, key: str, text: str) -> None:
    found = outside(text, limits)
    assert len(found) == 1
    assert f"{key}: " in found[0]
    assert "is outside the folders" in found[0]


def test_link_out_of_a_root_is_refused(limits: Settings, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.jsonl").write_text('{"text": "x"}\n')
    Path("data.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    assert "outside" in outside(GOOD.replace("builtin:python-docs", "data.jsonl"), limits)[0]


def test_folder_of_data_with_a_link_out_of_a_root_is_refused(limits: Settings, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.jsonl").write_text('{"text": "x"}\n')
    Path("rows").mkdir()
    (Path("rows") / "own.jsonl").write_text('{"text": "y"}\n')
    assert not examine(GOOD.replace("builtin:python-docs", "rows"), limits).problems
    (Path("rows") / "data.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    assert "link that leads out" in outside(GOOD.replace("builtin:python-docs", "rows"), limits)[0]


def test_limits_hold_for_recipes_below(limits: Settings) -> None:
    Path("below.yaml").write_text(GOOD.replace("builtin:python-docs", "/etc/passwd"))
    assert "outside" in outside(GOOD + "depends_on: below.yaml\n", limits)[0]
    Path("below.yaml").write_text(GOOD.replace("qwen2-tiny}", "qwen2-tiny, trust_remote_code: true}"))
    assert "would run code" in outside(GOOD + "depends_on: [below.yaml]\n", limits)[0]


def test_remote_code_needs_the_flag(limits: Settings) -> None:
    text = GOOD.replace("qwen2-tiny}", "qwen2-tiny, trust_remote_code: true}")
    assert "--allow-remote-code" in outside(text, limits)[0]
    allowed = Settings(limits.roots, limits.runs, allow_remote_code=True)
    assert not examine(text, allowed).problems


def test_reward_functions_need_the_flag_unless_they_are_shipped(limits: Settings) -> None:
    Path("mine.py").write_text("def half(completions, **_):\n    return [0.5 for _ in completions]\n")
    text = GOOD + "method: {type: grpo, rewards: [{function: half, file: mine.py}], max_completion_length: 8}\n"
    assert [one.code for one in examine(text, limits).problems] == ["webui.remote_code_refused"]
    allowed = Settings(limits.roots, limits.runs, allow_remote_code=True)
    assert not examine(text, allowed).problems
    far = examine(text.replace("mine.py", "/etc/mine.py"), allowed)
    assert [one.code for one in far.problems] == ["webui.path_outside"]


def test_a_server_that_samples_needs_the_flag(limits: Settings) -> None:
    for server in ("http://192.0.2.1", '{url: "http://192.0.2.1"}'):
        text = f"{GOOD}method: {{type: grpo, rewards: exact_answer, max_completion_length: 8, server: {server}}}\n"
        assert "webui.remote_code_refused" in [one.code for one in examine(text, limits).problems]
        allowed = Settings(limits.roots, limits.runs, allow_remote_code=True)
        assert "webui.remote_code_refused" not in [one.code for one in examine(text, allowed).problems]


def test_every_key_that_may_be_a_path_is_limited() -> None:
    """A new key whose description speaks of files or folders is in ``paths_of``, or here."""
    others = {"model.revision", "method.teacher.revision", "data.train[0].split", "data.eval[0].split",
              "method.rewards[0].function", "logging.run_name"}  # fmt: skip
    said = re.compile("folder|file|path|hub", re.IGNORECASE)
    keys = [key for key, _, field, shape in walk()
            if accepts(shape, str) and not shape.sections and said.search(field.description or "")]  # fmt: skip
    tree: dict[str, Any] = {}
    for key in keys:
        holder: Any = tree
        for part, following in pairwise(key):
            new: Any = [{}] if following == 0 else {}
            holder = holder[part] if isinstance(holder, list) else holder.setdefault(part, new)
        holder[key[-1]] = "x"
    limited = {dotted(key) for key, _ in paths_of(tree)}
    assert len(limited) > 8
    assert {dotted(key) for key in keys} - others == limited


@pytest.mark.parametrize(
    "line",
    [
        "# hf_abcdefghijklmnopqrstuvwxyz0123456789",
        "model2: sk-abcdefghijklmnopqrstuvwx",
        "# https://me:secret@host/x",
        "# xoxb-0123456789-abcdefghij",
        "# my key: 0123456789abcdef0123456789abcdef01234567",
        "# wandb_v1_0123456789abcdefghijABCDEFGHIJ",
    ],
)
def test_token_in_a_recipe_is_refused_and_not_repeated(limits: Settings, line: str) -> None:
    examined = examine(f"{GOOD}{line}\n", limits)
    problem = next(problem for problem in examined.problems if "access token" in problem.what)
    assert problem.where == "recipe.yaml:4"
    assert line.split()[-1] not in str(problem)
    assert '"keep": false' in form_state(examined, None, load_words("en"))


def test_a_revision_is_no_token(limits: Settings) -> None:
    assert not examine(GOOD.replace("qwen2-tiny}", f"qwen2-tiny, revision: {'0123abcd' * 5}}}"), limits).secret


def test_too_large_a_text_is_refused(limits: Settings) -> None:
    assert "too many" in str(examine("#" * 200_000, limits).problems[0])


def test_runnable_text_names_whole_paths(limits: Settings) -> None:
    Path("below.yaml").write_text(GOOD.replace("runs/x", "runs/y"))
    examined = examine(f"# kept\n{GOOD}depends_on: [below.yaml]\n", limits)
    assert not examined.problems
    assert str(Path("below.yaml").resolve()) in examined.runnable
    assert examined.runnable.startswith("# kept\n")


MADE = "depends_on: [below.yaml]\nmodel: {name_or_path: runs/base/final}\n" + GOOD.split("\n", 1)[1]


def test_another_model_lets_go_of_the_recipe_that_made_the_one_before(limits: Settings) -> None:
    Path("below.yaml").write_text(GOOD.replace("runs/x", "runs/base"))
    assert not needless(MADE, limits)
    edit = {"op": "set", "field": "model.name_or_path", "value": "builtin:llama-tiny"}
    changed = edited(MADE, [edit], limits)
    assert "depends_on" not in changed
    assert "builtin:llama-tiny" in changed
    other = edited(MADE, [{**edit, "field": "training.seed", "value": "3"}], limits)
    assert "depends_on" in other
    by_hand = MADE.replace("runs/base/final", "builtin:llama-tiny")  # a text stays as it was written, and it is said
    assert needless(by_hand, limits) == ["below.yaml"]
    assert "depends_on" in edited(by_hand, [{**edit, "value": "builtin:qwen2-tiny"}], limits)


def test_of_several_only_the_one_that_was_needed_goes(limits: Settings) -> None:
    Path("below.yaml").write_text(GOOD.replace("runs/x", "runs/base"))
    Path("other.yaml").write_text(GOOD.replace("runs/x", "runs/other"))
    text = MADE.replace("[below.yaml]", "[other.yaml, below.yaml]").replace("builtin:python-docs", "runs/other")
    assert read(without_needless(text, text.replace("runs/base", "runs/b"), limits)).values["depends_on"] == [
        "other.yaml"
    ]


def test_a_recipe_outside_the_limits_is_not_read_for_that(limits: Settings, tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text(GOOD.replace("runs/x", "runs/base"))
    assert needless(GOOD + "depends_on: [../below.yaml]\n", limits) == []


@pytest.mark.parametrize("key", ["model.name_or_path", "model.tokenizer", "data.train", "training.output_dir"])
def test_a_path_that_no_disk_takes_is_a_problem_and_no_traceback(limits: Settings, key: str) -> None:
    section, _, name = key.partition(".")
    values = {**read(GOOD).values}
    values[section] = {**values[section], name: "a\0b"}
    examined = examine(json.dumps(values), limits)
    assert examined.problems


def test_an_edit_of_an_entry_that_is_not_there_does_nothing(limits: Settings) -> None:
    for number in (1, 9999):
        edit = {"op": "set", "field": f"data.train[{number}].path", "value": "x.jsonl"}
        changed = edited(GOOD, [edit], limits)
        assert ("x.jsonl" in changed) == (number == 1)
        assert edited("", [edit], limits) == ""
