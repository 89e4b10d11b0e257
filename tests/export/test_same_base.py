"""Chat and export take the base model that the run was trained from, and the result as training wrote it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import checkpoint, finished_run

from halftune.cli import main
from halftune.core.errors import ModelError
from halftune.core.manifest import MANIFEST, seal
from halftune.export.merged import export_run
from halftune.infer.session import open_session
from halftune.model.files.result import check_written, finished_at, write_finished
from halftune.model.result.completed_run import open_run

ALLOWED = "training.allow_changes=[model]"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and two runs on it: ``base``, ``lora``, ``full``."""
    place = tmp_path_factory.mktemp("made")
    checkpoint(place / "base", torch.float32, vocab_size=4096)
    finished_run(place / "lora", place / "base")
    finished_run(place / "full", place / "base", adapter="none")
    return place


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """``run("lora")`` → that run in a copy of everything, by a recipe that names the copy."""
    shutil.copytree(made, tmp_path / "copy")

    def folder(name: str) -> Path:
        recipe = tmp_path / "copy" / name / "resolved.yaml"
        recipe.write_text(recipe.read_text().replace(str(made), str(tmp_path / "copy")))
        return recipe.parent

    return folder


def scale(base: Path) -> None:
    path = base / "model.safetensors"
    save_file({name: one * 1.05 for name, one in load_file(path).items()}, path, metadata={"format": "pt"})


def test_another_base_model_is_refused_unless_it_is_allowed(run, tmp_path: Path, caplog) -> None:
    folder = run("lora")
    open_session(open_run(str(folder)))  # a copy elsewhere is the same model
    scale(folder.parent / "base")
    for use in (open_session, lambda run: export_run(run, tmp_path / "out")):
        with pytest.raises(ModelError, match=r"model\.safetensors has changed") as caught:
            use(open_run(str(folder)))
        assert ALLOWED in str(caught.value)
        assert not (tmp_path / "out").exists()
    caplog.set_level(logging.WARNING)
    export_run(open_run(str(folder), [ALLOWED]), tmp_path / "out")
    assert "model.safetensors has changed" in caplog.text


def test_the_base_beside_a_full_model_is_compared_when_it_is_asked(run) -> None:
    folder = run("full")
    scale(folder.parent / "base")
    session = open_session(open_run(str(folder)))
    assert session.answer("hello", tuned=True) is not None
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        session.answer("hello", tuned=False)


def test_what_a_recipe_allowed_when_it_was_resumed_is_not_allowed_now(run) -> None:
    folder = run("lora")
    recipe = folder / "resolved.yaml"
    recipe.write_text(recipe.read_text().replace('"training": {', '"training": {"allow_changes": ["model"], '))
    scale(folder.parent / "base")
    with pytest.raises(ModelError, match="allow_changes"):
        open_session(open_run(str(folder)))


@pytest.mark.parametrize("same", [True, False])
def test_a_hub_model_whose_branch_has_moved(run, same: bool, caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run("lora")
    base = folder.parent / "base"
    commits = [base.parent / "snapshots" / name for name in ("a" * 40, "b" * 40)]
    for commit in commits:
        shutil.copytree(base, commit)
    from halftune.model.files import identity
    from halftune.model.files.identity import check_base, model_identity
    from halftune.model.load import load

    for module in (identity, load):
        monkeypatch.setattr(module, "locate", lambda model: commits[0])
    opened = open_run(str(folder))
    before = model_identity(opened.loaded.run.model)
    for module in (identity, load):
        monkeypatch.setattr(module, "locate", lambda model: commits[1])
    if same:
        check_base(before, opened.loaded.run.model, allowed=False)
        assert "b" * 40 in caplog.text
        return
    scale(commits[1])
    with pytest.raises(ModelError, match=f"model.revision={'a' * 40}"):
        check_base(before, opened.loaded.run.model, allowed=False)


def flip(final: Path) -> None:
    path = next(final.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def link(final: Path) -> None:
    """The same bytes, but elsewhere."""
    path = final / "tokenizer_config.json"
    path.rename(final.parent / path.name)
    path.symlink_to(final.parent / path.name)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (flip, "checksum"),
    "missing": (lambda final: (final / "tokenizer.json").unlink(), "tokenizer.json"),
    "sealed again": (lambda final: [flip(final), (final / MANIFEST).unlink(), seal(final, MANIFEST)], MANIFEST),
    "link": (link, "symbolic link"),
    "added": (lambda final: (final / "adapter_model.bin").write_bytes(b"x"), "adapter_model.bin"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_result_that_is_not_what_was_written_is_refused(run, fault: str) -> None:
    damage, named = FAULTS[fault]
    folder = run("lora")
    damage(folder / "final")
    with pytest.raises(ModelError, match=named):
        open_run(str(folder))


def test_notes_beside_a_result_are_no_damage(run) -> None:
    folder = run("lora")
    for name in (".DS_Store", "NOTES.md", ".cache/huggingface/download/x.metadata"):
        (folder / "final" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "final" / name).write_text("x")
    assert open_run(str(folder)).is_adapter


def test_a_result_of_an_earlier_version_is_told_to_be_unverified(run, caplog) -> None:
    folder = run("lora")
    (folder / "final" / MANIFEST).unlink()
    (folder / "finished.json").write_text('{"step": 1, "time": 1.0}')
    open_session(open_run(str(folder)))
    assert "cannot verify" in caplog.text
    assert "cannot verify the base model" in caplog.text


@pytest.mark.parametrize("base", ["x", {}, {"commit": None, "files": {"a": 1}}, {"commit": 1, "files": []}])
def test_an_identity_that_is_none_is_not_compared(run, base: object, caplog) -> None:
    folder = run("lora")
    (folder / "final" / MANIFEST).unlink()
    seal(folder / "final", MANIFEST, facts={"base": base})
    write_finished(folder, 1)
    open_session(open_run(str(folder)))
    assert "cannot verify the base model" in caplog.text


def test_a_huge_note_of_the_end_is_not_read(run) -> None:
    folder = run("lora")
    with (folder / "finished.json").open("r+b") as file:
        file.truncate(1 << 40)
    assert finished_at(folder) is None


def started(final: Path, place: Path, verb: str, capsys) -> tuple[object, str]:
    """Exit code and message of a verb on a recipe whose base model is a result."""
    place.mkdir()
    (place / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    (place / "x.yaml").write_text(
        f"model: {{name_or_path: {final}}}\ndata: {{train: {place / 'rows.jsonl'}}}\n"
        f"training: {{output_dir: {place / 'out'}, max_steps: 1}}\n"
    )
    with pytest.raises(SystemExit) as end:
        main([verb, "--config", str(place / "x.yaml")])
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize("where", ["in its run", "copied"])
@pytest.mark.parametrize("fault", ["flipped", "missing", "sealed again"])
def test_a_result_that_is_damaged_is_no_base_model(run, tmp_path: Path, capsys, where: str, fault: str) -> None:
    final = run("full") / "final"
    if where == "copied":
        final = shutil.copytree(final, tmp_path / "elsewhere")
    check_written(final, thorough=True)
    FAULTS[fault][0](final)
    if (where, fault) == ("copied", "sealed again"):  # nobody else knows what it was
        return check_written(final, thorough=True)
    code, said = started(final, tmp_path / "next", "train", capsys)
    assert (code, "model.result_damaged" in said) == (ModelError.exit_code, True)
    assert not (tmp_path / "next" / "out").exists()


def test_the_main_process_of_several_compares_the_result_it_starts_from(
    run, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = run("full") / "final"
    FAULTS["flipped"][0](final)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    code, said = started(final, tmp_path / "next", "train", capsys)
    assert (code, "model.result_damaged" in said) == (ModelError.exit_code, True)


def test_a_result_that_is_cut_short_is_seen_by_plan(run, tmp_path: Path, capsys) -> None:
    final = run("full") / "final"
    (final / "tokenizer.json").write_text((final / "tokenizer.json").read_text() + "\n")
    assert "model.result_damaged" in started(final, tmp_path / "next", "plan", capsys)[1]


@pytest.mark.parametrize("manifest", ['{"name": "an extension"}', "[]"])
def test_a_manifest_of_another_tool_is_left_alone(made: Path, tmp_path: Path, manifest: str) -> None:
    base = shutil.copytree(made / "base", tmp_path / "base")
    (base / MANIFEST).write_text(manifest)
    check_written(base, thorough=True)
