"""The architecture behind a config: built once, without torch in this process, without a checkpoint's code."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import LIMIT
from transformers import AutoModelForCausalLM

from halftune.config.facts import architecture
from halftune.config.facts.architecture import architecture_of
from halftune.config.facts.model import read_model_facts
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError

LLAMA = {
    **{"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "vocab_size": 32},
}
READ = """
import sys
from halftune.config.facts.architecture import architecture_of
built = architecture_of({raw}, multimodal=False)
assert built is not None
assert "torch" not in sys.modules
print(sum(one.size * one.count for one in built.tensors))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "cache"))
    architecture._architecture.cache_clear()
    return tmp_path / "cache" / "architectures"


def never(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("it was built again")


@pytest.mark.slow
def test_a_process_without_torch_builds_it_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", READ.format(raw=LLAMA)]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(architecture, "_built", never)
    built = architecture_of(LLAMA, multimodal=False)
    assert built is not None
    assert int(done.stdout) == sum(one.size * one.count for one in built.tensors)
    assert built.text["num_key_value_heads"] == 2


def test_what_cannot_be_built_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {"model_type": "no_such_model"}
    assert architecture_of(raw, multimodal=False) is None
    architecture._architecture.cache_clear()
    monkeypatch.setattr(architecture, "_built", never)
    assert architecture_of(raw, multimodal=False) is None


def test_a_builder_that_dies_is_asked_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "BUILDER", "halftune.no_such_module")
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    assert architecture_of(LLAMA, multimodal=False) is None
    assert not cache.exists()


HELPER = """
import json, os, signal, sys, time

def describe(raw, multimodal):
    return {"error": "built here"}

if __name__ == "__main__":
    sys.stdin.read()
    WHAT
"""


@pytest.mark.parametrize(
    ("what", "found", "said"),
    [
        ("time.sleep(600)", "sizes", "took more than 1 s"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "unbuilt", "signal 9"),
        ("sys.exit('no space')", "unbuilt", "no space"),
        ("print('{')", "unbuilt", "did not answer"),
        ("print(json.dumps({'missing': 'no timm'}))", "unbuilt", "no timm"),
    ],
)
def test_what_ended_the_builder_is_said(
    what: str, found: str, said: str, cache: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    (tmp_path / "helper_of_a_test.py").write_text(HELPER.replace("WHAT", what))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, value in (("BUILDER", "helper_of_a_test"), ("TIME_LIMIT", 1.0), ("_NOTICE", 0.1)):
        monkeypatch.setattr(architecture, name, value)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(logging.getLogger("halftune"), "propagate", True)
    if "sleep" not in what:  # these answer at once, on a slow machine too
        monkeypatch.setattr(architecture, "TIME_LIMIT", 300.0)
    assert architecture.architecture_or_reason(LLAMA, multimodal=False) == found
    assert said in caplog.text
    assert cache.exists() == (found == "sizes")


@pytest.mark.parametrize(
    ("key", "value"), [("tie_word_embeddings", "maybe"), ("eos_token_id", "x"), ("rms_norm_eps", "x")]
)
def test_a_value_of_the_wrong_type_is_refused(key: str, value: str) -> None:
    for _ in range(2):  # from the cache, too
        with pytest.raises(ModelError) as caught:
            architecture.architecture_or_reason({**LLAMA, key: value}, multimodal=False, where="m/config.json")
        assert (caught.value.code, caught.value.where) == ("model.config_invalid", "m/config.json")
        assert key in caught.value.what
        architecture._architecture.cache_clear()


def test_a_package_that_is_missing_is_no_answer(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_args: Any, **_kwargs: Any) -> Any:
        raise ModuleNotFoundError("timm")

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", missing)
    assert architecture_of(LLAMA, multimodal=False) is None
    assert not cache.exists()


@pytest.mark.parametrize("content", ["[1]", "[" * 100_000, '{"tensors": [1], "text": {}}', '{"tensors": []}', "pipe"])
def test_what_others_left_in_a_shared_cache_is_built_again(cache: Path, content: str) -> None:
    built = architecture_of(LLAMA, multimodal=False)
    (file,) = cache.iterdir()
    if content == "pipe":
        file.unlink()
        os.mkfifo(file)
    else:
        file.write_text(content)
    architecture._architecture.cache_clear()
    assert architecture_of(LLAMA, multimodal=False) == built


def test_another_config_is_built_apart(cache: Path) -> None:
    for layers in (1, 2):
        built = architecture_of({**LLAMA, "num_hidden_layers": layers}, multimodal=False)
        assert built is not None
        assert {len(one.layers) for one in built.tensors} == {0, layers}
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("place", [{}, {"text_config": {**LLAMA, "num_hidden_layers": 10**9}}])
def test_no_config_makes_it_build_for_ever(place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "_built", never)
    raw = {**LLAMA, **(place or {"num_hidden_layers": 10**9})}
    assert architecture_of(raw, multimodal=False) is None


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_a_checkpoint_is_not_run(tmp_path: Path, trusted: bool) -> None:
    ran = tmp_path / "ran"
    code = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "auto_map": code}))
    (tmp_path / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    model = ModelSection(name_or_path=str(tmp_path), trust_remote_code=trusted, revision="0" * 40 if trusted else None)
    facts = read_model_facts(model)
    assert facts.num_parameters_exact is not trusted  # its own code might build anything
    assert not ran.exists()
