"""What may change between two launches of a run, and what happens: the table in docs/reference/resume.md."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halftune.config.load import load_run
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ConfigError, ModelError, TrainingError
from halftune.core.manifest import MARKER, damage, entry, seal
from halftune.model.files import identity
from halftune.model.files.identity import model_identity, tokenizer_identity
from halftune.model.files.result import base_of_result, finished_at
from halftune.model.result.completed_run import open_checkpoint
from halftune.train.checkpoint.checkpoint import open_weights
from halftune.train.checkpoint.to_result import write_result
from halftune.train.loop import stepper
from halftune.train.run_folder.checkpoints import find_damage, folders, state_of
from halftune.train.run_folder.same_run import recorded
from halftune.train.run_folder.start_or_resume import already_finished
from halftune.train.trainer import train

SETTINGS = ("training.max_steps=4", "training.save_steps=2", "training.eval_steps=2", "data.cache=false")
Place = dict[str, Path]


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    """The run that every test copies, and what it is made of."""
    return {}


@pytest.fixture
def place(
    recipe, made: Place, small_model: Path, rows_file: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """A run stopped after its second step, with a model and data of its own: ``model``, ``rows``, ``eval``, ``run``."""
    if not made:
        whole = tmp_path_factory.mktemp("whole")
        shutil.copytree(small_model, whole / "model")
        shutil.copy(rows_file, whole / "rows.jsonl")
        (whole / "eval.jsonl").write_text("".join(rows_file.read_text().splitlines(keepends=True)[:8]))
        made |= {name: whole / name for name in ("model", "rows.jsonl", "eval.jsonl", "run")}
        train(*recipe(*settings(made)))
        shutil.rmtree(whole / "run" / "final")
        (whole / "run" / "finished.json").unlink()
        shutil.rmtree(whole / "run" / "checkpoint-4")
    backup = tmp_path / "backup"
    shutil.copytree(made["run"].parent, backup)
    yield made
    shutil.rmtree(made["run"].parent)  # the run folder names these places: they are put back, not copied
    shutil.copytree(backup, made["run"].parent)


def settings(place: Place, *more: str) -> tuple[str, ...]:
    own = (
        *SETTINGS,
        f"model.name_or_path={place['model']}",
        f"data.train={place['rows.jsonl']}",
        f"data.eval={place['eval.jsonl']}",
        f"training.output_dir={place['run']}",
    )
    return tuple({word.partition("=")[0]: word for word in (*own, *more)}.values())


def scaled(place: Place) -> None:
    """Another base model of the same shape, as a mended upload would be."""
    path = place["model"] / "model.safetensors"
    save_file({name: tensor * 1.05 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


def token_added(place: Place) -> None:
    path = place["model"] / "tokenizer.json"
    tree = json.loads(path.read_text())
    tree["added_tokens"][-1]["single_word"] = True
    path.write_text(json.dumps(tree))


def template(place: Place) -> None:
    path = place["model"] / "chat_template.jinja"
    path.write_text("{# mended #}" + path.read_text())


def rows(place: Place, name: str = "rows.jsonl") -> None:
    """Other words of as many tokens in a row that no sample of the fingerprint holds."""
    lines = place[name].read_text().splitlines(keepends=True)
    number = next(n for n in range(5, len(lines)) if "then 7" in lines[n] or "then 5" in lines[n])
    lines[number] = lines[number].replace("then 7", "then 8").replace("then 5", "then 6")
    place[name].write_text("".join(lines))


def eval_rows(place: Place) -> None:
    path = place["eval.jsonl"]
    path.write_text(path.read_text().replace("Add", "Sum", 1))


CHANGES: dict[str, tuple[Callable[[Place], None], str]] = {
    "model": (scaled, "model.safetensors"),
    "tokenizer": (token_added, "tokenizer.json"),
    "template": (template, "chat template"),
    "train_data": (rows, "training data"),
    "eval_data": (eval_rows, "evaluation data"),
}


@pytest.mark.parametrize("part", CHANGES)
def test_what_a_run_is_made_of_may_not_change_unless_it_is_allowed(recipe, place: Place, caplog, part: str) -> None:
    change, named = CHANGES[part]
    change(place)
    before = sorted(place["run"].rglob("*"))
    with pytest.raises(ConfigError, match=named) as caught:
        train(*recipe(*settings(place)))
    assert f"training.allow_changes: [{part}]" in str(caught.value)
    assert sorted(place["run"].rglob("*")) == before, "a start that is refused changes nothing"
    assert train(*recipe(*settings(place, f"training.allow_changes=[{part}]"))).step == 4
    log = (place["run"] / "train.log").read_text()
    assert "training.allow_changes permits" in log
    assert named in log
    lines = [json.loads(line) for line in (place["run"] / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 2, 4], "evaluated anew before it goes on"


@pytest.mark.parametrize("part", [None, "model", "template", "train_data"])
def test_a_rerun_begins_anew_and_says_what_differs(
    recipe, place: Place, tmp_path: Path, caplog, part: str | None
) -> None:
    if part is not None:
        CHANGES[part][0](place)
    again = ("training.max_steps=1", "training.eval_steps=1", f"training.output_dir={tmp_path / 'again'}")
    caplog.set_level("WARNING")
    assert train(load_run(place["run"], again), recipe(*settings(place, *again))[1]).step == 1
    said = [line for line in caplog.messages if str(place["run"]) in line]
    assert len(said) == (part is not None)
    assert part is None or CHANGES[part][1] in said[0]


def test_a_rerun_of_a_run_that_names_no_inputs_says_so(recipe, place: Place, tmp_path: Path, caplog) -> None:
    (place["run"] / "environment.json").unlink()
    again = ("training.max_steps=1", "training.eval_steps=1", f"training.output_dir={tmp_path / 'again'}")
    train(load_run(place["run"], again), recipe(*settings(place, *again))[1])
    assert "not compared" in caplog.text


def test_the_date_of_a_template_is_that_of_the_first_launch(recipe, place: Place, monkeypatch, tmp_path: Path) -> None:
    class Clock(date):
        now = "2031-03-01"

        @classmethod
        def today(cls) -> date:
            return date.fromisoformat(cls.now)

    monkeypatch.setattr("halftune.data.pipeline.date", Clock)
    path = place["model"] / "chat_template.jinja"
    path.write_text("{{ strftime_now('%d %B') }}" + path.read_text())
    run, whole = tmp_path / "dated", tmp_path / "whole"
    train(*recipe(*settings(place, f"training.output_dir={run}")))
    shutil.copytree(run / "final", whole)
    for gone in ("final", "checkpoint-4"):
        shutil.rmtree(run / gone)
    (run / "finished.json").unlink()
    Clock.now = "2031-04-22"
    assert train(*recipe(*settings(place, f"training.output_dir={run}"))).step == 4
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (whole, run / "final"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def edit_state(place: Place, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes what the checkpoint says, as another version or machine would have written it."""
    checkpoint = place["run"] / "checkpoint-2"
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    (checkpoint / MARKER).unlink()
    seal(checkpoint)


def model_of(state: dict[str, Any]) -> dict[str, Any]:
    return state["made_of"]["model"]


NOTED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another commit": (lambda state: model_of(state).update(commit="0" * 40), "commit"),
    "generation_config.json": (lambda s: model_of(s).update(noted={"generation_config.json": ""}), "generation_config"),
    "written again": (lambda s: model_of(s)["files"]["model.safetensors"].update(mtime_ns=1), "rewritten"),
    "versions": (lambda state: state["made_with"].update(torch="1.0"), "torch 1.0"),
    "hardware": (lambda state: state["made_with"].update(device="cuda", gpu="X"), "device cuda"),
    "dtype of auto": (lambda state: state["made_with"].update(compute="bf16"), "compute bf16"),
    "attention of auto": (lambda state: state["made_with"].update(attention="fa2"), "attention fa2"),
}


AT_ONCE = [name for name in NOTED if name != "written again"]  # which is told where the commit is the same


@pytest.mark.parametrize("cases", [["written again"], AT_ONCE], ids=["written again", "all else"])
def test_what_changes_no_content_is_noted(recipe, place: Place, cases: list[str]) -> None:
    edit_state(place, lambda state: [NOTED[case][0](state) for case in cases])
    assert train(*recipe(*settings(place))).step == 4
    log = (place["run"] / "train.log").read_text()
    assert not [case for case in cases if NOTED[case][1] not in log]
    assert not (place["run"] / "set-aside").exists()


def test_a_checkpoint_of_an_earlier_version_is_not_compared(recipe, place: Place) -> None:
    edit_state(place, lambda state: state.pop("made_of"))
    assert train(*recipe(*settings(place))).step == 4
    assert "not compared" in (place["run"] / "train.log").read_text()
    assert not (place["run"] / "set-aside").exists()


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ("training.seed=7", "training.seed"),
        ("data.packing=true", "packing"),
        ("precision=bf16", "precision"),
        ("adapter.rank=8", "adapter.rank"),
        ("training.per_device_train_batch_size=4", "rows a step"),
        ("data.train=[{path: $rows.jsonl, weight: 2}]", "data.train"),
        ("training.gradient_accumulation_steps=2 training.per_device_train_batch_size=4", ""),
        ("data.train=$eval.jsonl training.allow_changes=[train_data]", ""),
        ("model.name_or_path=$model/../moved training.allow_changes=[model]", ""),
    ],
)
def test_what_of_the_recipe_may_change(recipe, place: Place, change: str, refused: str) -> None:
    shutil.copytree(place["model"], place["model"].parent / "moved")
    for name, path in place.items():
        change = change.replace(f"${name}", str(path))
    words = [part.strip() for part in change.replace(" training.", "\n training.").split("\n")]
    asked = settings(place, *words)
    if refused:
        with pytest.raises(ConfigError, match=refused):
            train(*recipe(*asked))
    else:
        assert train(*recipe(*asked)).step == 4


@pytest.mark.parametrize("variables", [{"RANK": "3"}, {"RANK": "x"}, {"LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}])
def test_a_stray_launchers_variable_changes_nothing(
    recipe, place: Place, monkeypatch, caplog, variables: dict[str, str]
) -> None:
    caplog.set_level("INFO")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert train(*recipe(*settings(place))).step == 4
    assert not (place["run"] / "set-aside").exists()
    assert f"resuming from {place['run'] / 'checkpoint-2'}" in caplog.text
    assert (place["run"] / "finished.json").exists()


def test_a_long_weight_file_is_sampled(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "snapshots" / "c0ffee"
    shutil.copytree(small_model, folder)
    weights, model = folder / "model.safetensors", ModelSection(name_or_path=str(folder))
    whole = model_identity(model)
    assert whole["commit"] == "c0ffee"
    assert "mtime_ns" not in whole["files"][weights.name]
    monkeypatch.setattr(identity, "WHOLE", 10_000)
    before = model_identity(model)["files"][weights.name]
    os.utime(weights, ns=(1, 1))
    touched = model_identity(model)["files"][weights.name]
    assert touched == before | {"mtime_ns": 1}
    tensors = load_file(weights)
    for name in tensors:
        other = {**tensors, name: tensors[name] + 1}
        save_file(other, weights, metadata={"format": "pt"})
        assert model_identity(model)["files"][weights.name]["digest"] != before["digest"], name
    save_file(tensors, weights, metadata={"format": "np"})
    assert model_identity(model)["files"][weights.name]["digest"] != before["digest"], "the header"


def test_the_code_of_a_tokenizer_in_a_folder_of_its_own(small_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small_model, tmp_path / "tokenizer"))
    trusted = ModelSection(name_or_path=str(small_model), tokenizer=str(folder), trust_remote_code=True)
    (folder / "code.py").write_text("a = 1")
    before = tokenizer_identity(trusted)
    (folder / "code.py").write_text("a = 2")
    assert {name for name, digest in tokenizer_identity(trusted).items() if digest != before[name]} == {"code.py"}
    untrusted = trusted.model_copy(update={"trust_remote_code": False})
    assert "code.py" not in tokenizer_identity(untrusted)


def test_nothing_is_moved_through_a_link(recipe, place: Place, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (place["run"] / "set-aside").symlink_to(elsewhere)
    shutil.copytree(place["run"] / "checkpoint-2", place["run"] / "checkpoint-3")
    (place["run"] / "checkpoint-3" / "state.json").unlink()
    with pytest.raises(TrainingError, match="symbolic link"):
        train(*recipe(*settings(place)))
    assert not list(elsewhere.iterdir())
    assert (place["run"] / "checkpoint-3").is_dir()


@pytest.mark.parametrize("number", ["9" * 12, "x"])
def test_a_file_name_does_not_say_how_many_parts_there_are(place: Place, number: str) -> None:
    checkpoint = place["run"] / "checkpoint-2"
    (checkpoint / f"trainable-00000-of-{number}.safetensors").write_text("")
    assert find_damage(checkpoint, thorough=True) == ""


def test_a_recipe_of_a_run_that_is_a_pipe_or_a_bomb(tmp_path: Path) -> None:
    path = tmp_path / "resolved.yaml"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="regular"):
        recorded(path)
    path.unlink()
    lists = [f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 9)}]" for i in range(1, 9)]
    for text in ("b0: &b0 [1]\n" + "\n".join(lists), "[" * 1_000_000):
        path.write_text(text)
        with pytest.raises(ConfigError) as refused:
            recorded(path)
        assert refused.value.code == "train.run_folder_damaged"


def test_a_last_step_that_is_no_number_is_no_end(tmp_path: Path) -> None:
    (tmp_path / "finished.json").write_text('{"step": 1e400}')
    assert finished_at(tmp_path) is None


def test_a_checkpoint_is_exported_with_its_own_base_model(place: Place, tmp_path: Path) -> None:
    checkpoint = place["run"] / "checkpoint-2"
    scaled(place)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        write_result(checkpoint, open_checkpoint(checkpoint, [], tmp_path / "refused"))
    assert not (tmp_path / "refused").exists()
    allowed = open_checkpoint(checkpoint, ["training.allow_changes=[model]"], tmp_path / "final")
    write_result(checkpoint, allowed)
    assert isinstance(base_of_result(tmp_path / "final"), dict)


@pytest.mark.parametrize("name", ["../outside", "/proc/kcore", "a/../../outside"])
def test_a_manifest_names_files_in_its_folder_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").write_text("x")
    marker = tmp_path / "run" / MARKER
    marker.write_text(json.dumps({"format": 1, "files": {name: entry(tmp_path / "outside")}}))
    assert "manifest" in damage(tmp_path / "run", thorough=True)


def test_a_fault_of_an_export_is_not_one_of_the_checkpoint(place: Place) -> None:
    with pytest.raises(LookupError, match="ours"), open_weights(place["run"] / "checkpoint-2"):
        raise LookupError("ours")


@pytest.mark.parametrize(("part", "value"), [("model", "x"), ("tokenizer", "x"), ("train_data", [None])])
def test_an_identity_that_is_none_is_not_compared(recipe, place: Place, part: str, value: Any) -> None:
    edit_state(place, lambda state: state["made_of"].update({part: value}))
    assert train(*recipe(*settings(place))).step == 4
    assert "not compared" in (place["run"] / "train.log").read_text()


LACKING: dict[str, Callable[[dict[str, Any]], object]] = {
    "position": lambda state: state["position"].pop("rows_per_step"),
    "rows": lambda state: state["position"].update(rows_per_step=0),
    "step": lambda state: state.update(step="2"[:0]),
    "group": lambda state: state["optimizer"]["groups"][0].pop("params"),
    "numbers": lambda state: state["optimizer"].update(numbers=None),
    "rate": lambda state: state["schedule"].pop("_last_lr"),
    "schedule": lambda state: state["schedule"].clear(),
    "callback": lambda state: state["callbacks"]["MetricsFile"].pop("waiting"),
    "window": lambda state: state["callbacks"]["MetricsFile"].update(window=[{"loss": 1}]),
    "python": lambda state: state["random"][0].update(python=[3]),
    "cpu": lambda state: state["random"][0].update(cpu=[1, 2]),
    "numpy": lambda state: state["random"][0].pop("numpy"),
    "random": lambda state: state.update(random=[None]),
    "micro_batch": lambda state: state.update(micro_batch=[4]),
    "best": lambda state: state.update(best=[2]),
    "another step": lambda state: state.update(step=1),
    "no epoch": lambda state: state.update(epoch=math.nan),
    "another batch": lambda state: state["micro_batch"].__setitem__(1, 3),
    "huge random numbers": lambda state: state["random"][0]["python"][1].__setitem__(0, 1 << 70),
    "a schedule elsewhere": lambda state: state["schedule"].update(last_epoch=10**400),
}


@pytest.mark.parametrize("what", LACKING)
def test_a_state_that_lacks_something_is_an_error_with_a_code(recipe, place: Place, what: str) -> None:
    edit_state(place, LACKING[what])
    with pytest.raises(TrainingError) as caught:
        train(*recipe(*settings(place)))
    assert caught.value.code == "train.checkpoint_damaged"
    assert "checkpoint-2" in str(caught.value) or "state.json" in str(caught.value)


def test_how_a_run_learns_is_what_its_recipe_says(recipe, place: Place) -> None:
    """A checkpoint of a stranger, whose checksums are right."""

    def change(state: dict[str, Any]) -> None:
        state["optimizer"]["groups"][0].update(maximize=True, betas=[0.0, 0.0], eps=-1.0, lr=1e9, foreign=1)
        state["schedule"].update(base_lrs=[1e9], lr_lambdas=[{"x": 1}], step=1, get_lr=None, optimizer=1)
        state["callbacks"]["MetricsFile"]["bytes"] = 10**15

    found = []
    for name, changes in (("as it was", None), ("changed", change)):
        copy = {**place, "run": place["run"].with_name(name)}
        shutil.copytree(place["run"], copy["run"])
        if changes is not None:
            edit_state(copy, changes)
        found.append(train(*recipe(*settings(copy))).folder)
    one, other = (load_file(folder / "final" / "adapter_model.safetensors") for folder in found)
    assert all(value.equal(other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", ["checkpoint-٣", "checkpoint-02", "checkpoint-+3", "checkpoint-3_0"])
def test_a_step_has_one_name(place: Place, name: str) -> None:
    before = folders(place["run"])
    shutil.copytree(place["run"] / "checkpoint-2", place["run"] / name)
    assert folders(place["run"]) == before


@pytest.mark.parametrize(("how", "refused"), [("written", True), ("replaced", False), ("touched", False)])
def test_a_base_model_that_is_written_to_while_it_is_in_use(
    recipe, place: Place, monkeypatch: pytest.MonkeyPatch, how: str, refused: bool
) -> None:
    step, path = stepper.start_step, place["model"] / "model.safetensors"

    def acting(*args: Any, **more: Any) -> Any:
        if how == "touched":
            os.utime(path)
        elif how == "replaced":
            os.replace(shutil.copy(path, path.with_name("beside")), path)
        else:
            with path.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"1234")
        return step(*args, **more)

    monkeypatch.setattr(stepper, "start_step", acting)
    if not refused:
        assert train(*recipe(*settings(place))).step == 4
        return
    with pytest.raises(ModelError) as error:
        train(*recipe(*settings(place)))
    assert error.value.code == "model.base_changed"
    assert not (place["run"] / "checkpoint-4").exists()


def test_a_huge_state_is_not_read(place: Place) -> None:
    with (place["run"] / "checkpoint-2" / "state.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="at most"):
        state_of(place["run"] / "checkpoint-2")


def test_lost_metrics_are_noticed(recipe, place: Place) -> None:
    path = place["run"] / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
    assert train(*recipe(*settings(place))).step == 4
    said = (place["run"] / "train.log").read_text()
    assert "earlier metrics are lost" in said
    shutil.rmtree(place["run"] / "final")
    path.unlink()
    train(*recipe(*settings(place)))
    assert (place["run"] / "train.log").read_text().count("earlier metrics are lost") == 2
    again = recipe(*settings(place))[0]
    assert path.name in already_finished(again)
    path.touch()
    assert path.name not in already_finished(again)


@pytest.mark.parametrize("old", [False, True])
def test_changed_metrics_are_noticed(recipe, place: Place, old: bool) -> None:
    path, state = place["run"] / "metrics.jsonl", place["run"] / "checkpoint-2" / "state.json"
    if old:  # a checkpoint of an earlier version knows the length only
        known = json.loads(state.read_text())
        del known["callbacks"]["MetricsFile"]["sha256"]
        state.write_text(json.dumps(known))
        seal(state.parent)
    text = path.read_text()
    at = text.index('"loss": ') + len('"loss": ')
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    assert train(*recipe(*settings(place))).step == 4
    assert ("metrics.jsonl was changed" in (place["run"] / "train.log").read_text()) is not old


def test_changed_answers_before_training_are_noticed(recipe, place: Place) -> None:
    more = ("logging.sample_prompts=[a]", "generation.max_new_tokens=2")
    shutil.rmtree(place["run"])
    train(*recipe(*settings(place, *more)))
    for changed in (False, True):
        shutil.rmtree(place["run"] / "final")
        (place["run"] / "finished.json").unlink()
        path = place["run"] / "samples.json"
        if changed:
            rows = json.loads(path.read_text())
            rows["samples"][0]["before"] += "!"
            path.write_text(json.dumps(rows))
        train(*recipe(*settings(place, *more)))
        assert ("samples.json was changed" in (place["run"] / "train.log").read_text()) is changed


def test_metrics_that_are_there_or_elsewhere_are_not_lost(recipe, place: Place, tmp_path: Path) -> None:
    named = f"training.resume={place['run'] / 'checkpoint-2'}"
    for folder in (place["run"], tmp_path / "branch"):
        train(*recipe(*settings(place, f"training.output_dir={folder}", named)))
        assert "lost" not in (folder / "train.log").read_text()
        assert "was changed after" not in (folder / "train.log").read_text()
