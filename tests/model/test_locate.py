"""Finding a model: each way that can fail says what to do."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from tiny_model import checkpoint, section

from halftune.config.facts.folder import check_adapter
from halftune.core.errors import ModelError
from halftune.model.files.builtin import materialize
from halftune.model.files.locate import locate, locate_tokenizer
from halftune.model.tokenizer.tokenizer import load_tokenizer


def test_builtin_and_folder(tmp_path: Path) -> None:
    assert locate(section("builtin:qwen2-tiny")) == materialize("qwen2-tiny")
    folder = checkpoint(tmp_path / "model")
    assert locate(section(folder)) == folder
    assert locate_tokenizer(section(folder, tokenizer="builtin:llama-tiny")) == materialize("llama-tiny")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/model", "~/nowhere-at-all", "runs/x/final"])
def test_a_path_that_is_none(name: str) -> None:
    with pytest.raises(ModelError, match="no model folder at"):
        locate(section(name))


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-no-such", "gpt2-no-such"])
def test_hub_out_of_reach(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"hub is unreachable.*builtin:qwen2-tiny"):
        locate(section(name))


def test_a_hub_without_an_address_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halftune.model.files.locate.hub_answers", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(ModelError, match="hub is unreachable"):
        locate(section("org/no-such-model"))


def test_neither_folder_nor_hub_id() -> None:
    with pytest.raises(ModelError, match="neither a folder nor a hub id"):
        locate(section("not a hub id!"))


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickles \(pytorch_model.bin\), which execute code"):
        locate(section(folder))


@pytest.mark.parametrize("name", ["model", 'it\'s a "model"; é'])
def test_the_command_that_converts_a_pickled_model(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path / "made")
    folder = folder.rename(tmp_path / name)
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    load_tokenizer(section("builtin:qwen2-tiny")).save_pretrained(folder)
    with pytest.raises(ModelError) as refused:
        locate(section(folder))
    run_printed(refused.value.remedy)
    converted = Path(f"{folder}-safetensors")
    assert locate(section(converted)) == converted
    found = load_file(converted / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(found[key].equal(weights[key]) for key in weights)
    assert load_tokenizer(section(converted))("a b").input_ids


def test_the_command_that_converts_a_pickled_adapter(tmp_path: Path) -> None:
    weights = {"a.lora_A.weight": torch.randn(2, 3), "a.lora_B.weight": torch.randn(4, 2).T.contiguous().T}
    torch.save(weights, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"the adapter is a pickle \(adapter_model.bin\)") as refused:
        check_adapter(tmp_path)
    run_printed(refused.value.remedy)
    check_adapter(tmp_path)
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert all(found[key].equal(weights[key]) for key in weights)


def run_printed(remedy: str) -> None:
    """Does what a shell would do with the printed command, in this process."""
    python, option, code = shlex.split(remedy.partition(": ")[2])
    assert (python, option) == ("python", "-c")
    exec(compile(code, "printed", "exec"), {})


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="contains an adapter, not a model"):
        locate(section(tmp_path))


def test_missing_shard_and_missing_weights(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelError, match="1 of 2 weight files are missing, first model-00002"):
        locate(section(folder))
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        locate(section(folder))


def test_code_of_another_hub_tokenizer_is_neither_fetched_nor_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        return str(repository)

    repository = tmp_path / "snapshot"
    repository.mkdir()
    names = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}}
    (repository / "tokenizer_config.json").write_text(json.dumps(names))
    (repository / "vocab.json").write_text("{}")
    (repository / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Theirs: pass\n")
    monkeypatch.setattr("halftune.model.files.locate.snapshot_download", snapshot)
    both = section("builtin:qwen2-tiny", tokenizer="org/theirs", trust_remote_code=True, revision="abc")
    with pytest.raises(ModelError, match=r"requires remote code · .* local copy"):
        load_tokenizer(both)
    assert not (tmp_path / "ran").exists()
    assert [(one["name"], one["revision"]) for one in asked] == [("org/theirs", None)]
    assert not any(pattern.endswith(".py") for pattern in asked[0]["allow_patterns"])
    checkpoint(repository)
    locate(section("org/model", trust_remote_code=True, revision="abc"))
    assert asked[1]["revision"] == "abc"
    assert "*.py" in asked[1]["allow_patterns"]


@pytest.mark.parametrize("trusted", [False, True])
def test_the_tokenizer_of_a_hub_model_is_fetched_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    hub, files = shutil.copytree(materialize("qwen2-tiny"), tmp_path / "hub"), set[str]()
    (hub / "modeling.py").write_text("")

    def snapshot(name: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        fetched = tmp_path / "cache"
        fetched.mkdir(exist_ok=True)
        for path in filter_repo_objects(
            sorted(hub.iterdir()), allow_patterns=allow_patterns, ignore_patterns=ignore_patterns, key=lambda p: p.name
        ):
            shutil.copy(path, fetched)
            files.add(path.name)
        return str(fetched)

    monkeypatch.setattr("halftune.model.files.locate.snapshot_download", snapshot)
    model = section("org/model", trust_remote_code=trusted, revision="0" * 40)
    assert len(load_tokenizer(model)) > 0
    assert "tokenizer.json" in files
    assert "model.safetensors" not in files
    assert ("modeling.py" in files) == trusted
    locate(model)
    assert "model.safetensors" in files
