"""vLLM's command line for runs: what it says, and what vLLM would refuse or leave out."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from tiny_model import checkpoint, finished_run

from halftune.cli import main
from halftune.core.errors import ModelError
from halftune.serve.runs import open_runs
from halftune.serve.vllm import vllm_command


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("vllm") / "base", vocab_size=4096)


def command(*folders: Path, **more: Any) -> list[str]:
    runs, name = open_runs([str(one) for one in folders])
    return vllm_command(runs, name, **{"host": "127.0.0.1", "port": 8000, "max_tokens": None, **more})


def after(option: str, found: list[str]) -> str:
    return found[found.index(option) + 1]


def test_adapters_of_one_base(base: Path, tmp_path: Path) -> None:
    one = finished_run(tmp_path / "one", base, generation={"max_new_tokens": 8, "temperature": 0.5})
    two = finished_run(tmp_path / "two", base, adapter={"type": "lora", "rank": 20})
    found = command(one, two, max_tokens=512)
    assert found[:3] == ["vllm", "serve", str(base)]
    assert after("--served-model-name", found) == "base"
    assert (after("--dtype", found), after("--max-model-len", found)) == ("float32", "512")
    assert (after("--max-lora-rank", found), after("--max-loras", found)) == ("32", "2")
    assert found[found.index("--lora-modules") + 1 :] == [f"one={one / 'final'}", f"two={two / 'final'}"]
    assert after("--tokenizer", found) == str(one / "final")
    assert after("--chat-template", found) == str(one / "final" / "chat_template.jinja")
    settings = json.loads((Path(after("--generation-config", found)) / "generation_config.json").read_text())
    ends = open_ends(one)
    assert settings["eos_token_id"] == ends
    assert (settings["temperature"], settings["max_new_tokens"]) == (0.5, 8)


def open_ends(folder: Path) -> list[int]:
    from transformers import AutoTokenizer

    return [AutoTokenizer.from_pretrained(folder / "final").convert_tokens_to_ids("<|im_end|>")]


def test_a_full_model(base: Path, tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "full", base, adapter="none", precision="bf16")
    found = command(folder)
    assert found[2] == str(folder / "final")
    assert (after("--served-model-name", found), after("--dtype", found)) == ("full", "bfloat16")
    assert "--enable-lora" not in found


@pytest.mark.parametrize(
    "adapter",
    [
        {"type": "lora", "rank": 4, "use_dora": True},
        {"type": "lora", "rank": 4, "modules_to_save": ["lm_head"]},
        {"type": "lora", "rank": 513},
        {"type": "ia3"},
    ],
    ids=["dora", "modules_to_save", "rank", "ia3"],
)
def test_what_vllm_does_not_load(adapter: dict[str, Any], base: Path, tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run", base, adapter=adapter)
    with pytest.raises(ModelError) as caught:
        command(folder)
    assert caught.value.code == "serve.vllm_unsupported"


def test_what_vllm_ignores_is_refused(base: Path, tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run", base)
    runs, name = open_runs([str(folder)])
    file = folder / "final" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "alpha_pattern": {"q_proj": 8}}))
    with pytest.raises(ModelError) as caught:
        vllm_command(runs, name, host="127.0.0.1", port=1, max_tokens=None)
    assert caught.value.code == "serve.vllm_unsupported"


def test_templates_that_differ(base: Path, tmp_path: Path) -> None:
    one, two = finished_run(tmp_path / "one", base), finished_run(tmp_path / "two", base)
    with (two / "final" / "chat_template.jinja").open("a") as file:
        file.write("\n")
    runs, name = open_runs([str(one)])
    others, _ = open_runs([str(one)])
    changed = {"two": type(others["one"])(**{**vars(others["one"]), "place": two / "final"})}
    with pytest.raises(ModelError) as caught:
        vllm_command({**runs, **changed}, name, host="127.0.0.1", port=1, max_tokens=None)
    assert caught.value.code == "serve.vllm_unsupported"


def exit_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    return int(ended.value.code or 0)


def test_the_command_is_printed_without_the_key(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished_run(tmp_path / "one", base)
    assert exit_of(str(folder), "--print-command", "--host", "0.0.0.0") == 2
    assert "serve.bad_key" in capsys.readouterr().err
    monkeypatch.setenv("HALFTUNE_API_KEY", "short")
    assert exit_of(str(folder), "--print-command") == 2
    monkeypatch.setenv("HALFTUNE_API_KEY", "a-key-of-sufficient-length")
    capsys.readouterr()
    assert exit_of(str(folder), "--print-command", "--host", "0.0.0.0", "generation.max_new_tokens=3") == 0
    said = capsys.readouterr().out
    assert after("--host", shlex.split(said)) == "0.0.0.0"
    assert "a-key-of" not in said
    key = tmp_path / "key"
    assert exit_of(str(folder), "--print-command", "--api-key-file", str(key)) == 2
    key.write_text("\n")
    assert exit_of(str(folder), "--print-command", "--api-key-file", str(key)) == 2
    assert exit_of("generation.max_new_tokens=3") == 2
    assert "serve.no_run" in capsys.readouterr().err


def test_it_becomes_vllm_with_the_key_in_its_environment(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, program = finished_run(tmp_path / "one", base), tmp_path / "vllm"
    told = tmp_path / "told"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HALFTUNE_API_KEY", "a-key-of-sufficient-length")

    def becomes(path: str, command: list[str], environment: dict[str, str]) -> None:
        told.write_text(json.dumps([path, command, environment["VLLM_API_KEY"]]))
        raise SystemExit(0)

    monkeypatch.setattr("os.execve", becomes)
    assert exit_of(str(folder), "--engine", "vllm") == 0
    path, found, key = json.loads(told.read_text())
    assert (path, found[:2], key) == (str(program), ["vllm", "serve"], "a-key-of-sufficient-length")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert exit_of(str(folder), "--engine", "vllm") != 0
