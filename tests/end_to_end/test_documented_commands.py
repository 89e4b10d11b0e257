"""The commands of README, tutorials, how-tos and reference: their options exist, and they run on a small recipe."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from halftune.cli import VERBS, _parsed, main
from halftune.config.shape import shape_at

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?:bash)?\n(.*?)^```|((?:^ {4}\S.*\n)+)", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\s*(halftune|train) ([a-z-].*)$", re.MULTILINE)
RECIPE = """\
model: {name_or_path: "builtin:qwen2-tiny"}
adapter: {type: lora, rank: 2}
data: {train: rows.jsonl, max_length: 64}
training: {output_dir: runs/mine, max_steps: 2, save_steps: 1, per_device_train_batch_size: 2, logging_steps: 1}
generation: {max_new_tokens: 2}
"""
LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
stage: sft
finetuning_type: lora
dataset: alpaca_en_demo
template: qwen
output_dir: saves
"""
# What needs several processes, the hub, another run, or half a minute: other tests prove them.
ELSEWHERE = re.compile(
    r"^bench|quickstart|several_devices|num_machines|--image|--audio|--video|qwen_lora_bf16|--sweep|webui|checkpoint-400"
    r"|^verify .*(models|http)"
    r"|runs/a|Qwen/|--tasks|--fail-"
    r"|^serve (?!.*--print-command)"
    r"|--push"
)


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Verb and arguments of each command in a page's blocks, without what follows ``|`` or ``>``."""
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    for command, line in COMMAND.findall("\n".join("".join(found) for found in BLOCK.findall(text))):
        if re.match(r"\w+:", line):  # a message: `halftune train: …`
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a text with an apostrophe
            continue
        words = words[: next((at for at, word in enumerate(words) if word in ("|", ">")), None)]
        verb = "train" if command == "train" else words.pop(0)
        if verb in VERBS and not any("…" in word for word in words):
            yield verb, words


ALL = [(page, verb, words) for page in PAGES for verb, words in commands(page)]
RUN = sorted({(verb, *words) for page, verb, words in ALL if "reference" not in page.parts})


def test_every_kind_of_page_has_commands() -> None:
    assert len(ALL) > 60
    assert {"train", "plan", "data", "chat", "export", "convert", "launch"} <= {verb for _, verb, _ in ALL}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_options_and_keys_exist(page: Path) -> None:
    for verb, words in commands(page):
        _, args = _parsed(verb, words)  # exits where an option does not exist
        for key in (override.partition("=")[0] for override in vars(args).get("overrides", ())):
            parts = re.findall(r"\w+", key)
            assert shape_at(tuple(int(part) if part.isdigit() else part for part in parts)), key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe under the names that the pages use, its rows, and its finished run."""
    place = tmp_path_factory.mktemp("documented")
    (place / "rows.jsonl").write_text('{"prompt": "a refund", "completion": "yes"}\n' * 8)
    shutil.copy(place / "rows.jsonl", place / "test.jsonl")
    for name in ("mine.yaml", "x.yaml", "run.yaml", "new.yaml", "lora.yaml"):
        (place / name).write_text(RECIPE)
    (place / "old.yaml").write_text(LLAMA_FACTORY)
    for name in ("data", "examples"):
        (place / name).mkdir()
    (place / "data" / "alpaca_en_demo.json").write_text('[{"instruction": "a", "output": "b"}]')
    (place / "data" / "dataset_info.json").write_text('{"alpaca_en_demo": {"file_name": "alpaca_en_demo.json"}}')
    shutil.copy(place / "old.yaml", place / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        with pytest.raises(SystemExit) as left:
            main(["train", "--config", "mine.yaml"])
        assert left.value.code == 0
    return place


@pytest.mark.slow
@pytest.mark.parametrize("words", [one for one in RUN if not ELSEWHERE.search(" ".join(one))], ids=" ".join)
def test_a_documented_command_runs(words: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", StringIO())  # a conversation that is over
    shutil.rmtree(folder / "models", ignore_errors=True)
    (folder / "new.yaml").write_text(RECIPE)
    if "-o" in words:
        (folder / "new.yaml").unlink()
    with pytest.raises(SystemExit) as left:
        main([found for word in words for found in (sorted(map(str, Path().glob(word))) if "*" in word else [word])])
    assert left.value.code in ((0, 1) if words[0] == "doctor" else (0,))  # a machine may lack what doctor looks for
