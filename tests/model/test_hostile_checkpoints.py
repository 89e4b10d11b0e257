"""Attacks by files: pickles under other names, links, code and templates of strangers. Each is refused or harmless."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import checkpoint, plan, section
from transformers import AutoModelForCausalLM

from halftune.config.facts.folder import check_adapter, check_code, check_weights
from halftune.config.sections.data import SourceSection
from halftune.core.errors import HalftuneError, ModelError
from halftune.data.formats.conversation import RowDropped
from halftune.data.sources.source import open_source
from halftune.data.templates.render import ChatTemplate
from halftune.model.files.builtin import materialize
from halftune.model.load.load import load_model
from halftune.model.tokenizer.tokenizer import end_of_turn_ids, load_tokenizer


class Trap:
    """Unpickled, it makes a file; whoever finds that file knows that code has run."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.file), "w")


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    return tmp_path / "sprung"


@pytest.fixture
def trap(sprung: Path) -> bytes:
    return pickle.dumps(Trap(sprung))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    folder = checkpoint(tmp_path_factory.mktemp("whole") / "model", vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(materialize("qwen2-tiny") / name, folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_the_trap_works(trap: bytes, sprung: Path) -> None:
    pickle.loads(trap).close()
    assert sprung.exists()


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
def test_a_pickle_that_is_called_safetensors(name: str, zipped: bool, folder: Path, trap: bytes, sprung: Path) -> None:
    if zipped:
        torch.save({"weight": Trap(sprung)}, folder / name)
    else:
        (folder / name).write_bytes(trap)
    if name.startswith("adapter"):
        (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="corrupt or truncated safetensors file"):
        check_adapter(folder) if name.startswith("adapter") else load_model(section(folder), plan())
    assert not sprung.exists()


def test_an_index_that_names_a_pickle(folder: Path, trap: bytes, sprung: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(trap)
    index = {"weight_map": {"lm_head.weight": "pytorch_model.bin", "x": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"the index contains pytorch_model\.bin"):
        load_model(section(folder), plan())
    assert not sprung.exists()


def test_pickles_beside_good_weights_are_never_opened(folder: Path, trap: bytes, sprung: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "x.pkl",
                 "adapter_model.bin", "tokenizer.pkl", "consolidated.00.pth"):  # fmt: skip
        (folder / name).write_bytes(trap)
    load_model(section(folder), plan())
    load_tokenizer(section(folder))
    assert not sprung.exists()


def test_an_adapter_beside_the_model_does_not_change_what_is_loaded(
    folder: Path, tmp_path: Path, trap: bytes, sprung: Path
) -> None:
    """transformers alone would load the base that adapter_config.json names in the place of the folder's own model."""
    other = checkpoint(tmp_path / "other", vocab_size=4096, num_hidden_layers=1)
    config = {"peft_type": "LORA", "base_model_name_or_path": str(other), "r": 1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.bin").write_bytes(trap)
    with pytest.raises(ModelError, match="also contains an adapter"):
        load_model(section(folder), plan())
    assert not sprung.exists()


CODE = "open({file!r}, 'w')\nclass Theirs: pass\n"


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
def test_code_beside_the_files_runs_only_where_it_is_trusted(where: str, folder: Path, sprung: Path) -> None:
    (folder / "theirs.py").write_text(CODE.format(file=str(sprung)))
    classes = {"AutoTokenizer": ["theirs.Theirs", None]} if "tokenizer" in where else {"AutoModel": "theirs.Theirs"}
    edit(folder / where, auto_map=classes, **({"tokenizer_class": "Theirs"} if "tokenizer" in where else {}))
    with suppress(ModelError):
        load_tokenizer(section(folder))
    with suppress(ModelError):
        load_model(section(folder), plan())
    assert not sprung.exists()


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json", "processor_config.json"])
@pytest.mark.parametrize("entry", ["other/repo--theirs.Theirs", ["other/repo--theirs.Theirs", None]])
def test_code_of_another_repository_is_refused_though_code_is_trusted(where: str, entry: Any, folder: Path) -> None:
    path = folder / where
    if not path.exists():
        path.write_text("{}")
    edit(path, auto_map={"AutoTokenizer": entry})
    with pytest.raises(ModelError, match="from another repository, other/repo, is not pinned"):
        check_code(folder, section(folder, trust_remote_code=True))


@pytest.mark.parametrize(
    "name",
    ["chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "merges.txt", "tokenizer.model",
     "additional_chat_templates/tools.jinja"],
)  # fmt: skip
def test_a_small_file_that_would_fill_the_memory(name: str, folder: Path) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    with (folder / name).open("ab") as file:
        file.truncate(1 << 28)  # sparse: it takes no place on the disk
    with pytest.raises(ModelError, match="the maximum is") as caught:
        load_tokenizer(section(folder))
    assert caught.value.where == str(folder / name)
    with pytest.raises(ModelError, match="the maximum is"):
        check_weights(folder)


ATTACKS = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch FILE') }}",
    "{{ messages.append.__self__.__class__.__base__.__subclasses__()[0] }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('FILE', 'w') }}",
    "{{ strftime_now.__globals__['os'].system('touch FILE') }}",
    "{% set x = messages.append({'role': 'user', 'content': 'more'}) %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch FILE') }}",
    "{{ '%s' | format(messages.__class__) | attr('__init__') }}",
    "{{ ('{0.__class__.__init__.__globals__}').format(raise_exception) }}",
    "{% for x in range(10 ** 12) %}{% endfor %}",
    "{{ 'a' * 10 ** 15 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_template_cannot_leave_its_sandbox(attack: str, folder: Path, sprung: Path) -> None:
    (folder / "chat_template.jinja").write_text(attack.replace("FILE", str(sprung)))
    shown = ""
    try:
        tokenizer = load_tokenizer(section(folder))
        shown = ChatTemplate(tokenizer).render([{"role": "user", "content": "a"}])
        end_of_turn_ids(tokenizer)
    except (RowDropped, ModelError) as said:
        shown += str(said)
    assert not re.search("<class|<function|<module|root:", shown)
    assert not sprung.exists()


def test_a_script_in_a_data_folder_is_text(tmp_path: Path, sprung: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.py").write_text(CODE.format(file=str(sprung)))
    (row,) = open_source(SourceSection(path=str(folder))).read().all()
    assert row["text"] == CODE.format(file=str(sprung))
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    assert open_source(SourceSection(path=str(folder))).read().all() == [{"text": "a"}]
    assert not sprung.exists()


def linked(folder: Path, make: Callable[[Path, Path], None]) -> Path:
    link = folder.parent / "linked"
    make(folder, link)
    return link


def each_file(folder: Path, link: Path) -> None:
    """As the hub's cache keeps them."""
    link.mkdir()
    for path in folder.iterdir():
        (link / path.name).symlink_to(path)


@pytest.mark.parametrize("make", [lambda folder, link: link.symlink_to(folder), each_file], ids=["folder", "files"])
def test_links_to_a_checkpoint_are_the_checkpoint(make: Callable[[Path, Path], None], folder: Path) -> None:
    model = load_model(section(linked(folder, make)), plan())
    same = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"])
def test_a_tokenizer_file_that_is_no_file(name: str, kind: str, folder: Path) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("nowhere")}[kind]()
    with pytest.raises(ModelError) as caught:
        load_tokenizer(section(folder))
    assert caught.value.code == ("core.broken_link" if kind == "link" else "core.file_damaged")
    assert name in caught.value.where


def test_links_that_lead_nowhere_or_to_themselves(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "elsewhere")
    (folder / "model.safetensors").symlink_to("gone")
    with pytest.raises(ModelError, match=r"model\.safetensors: broken symbolic link to gone"):
        check_named(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(ModelError, match="symbolic link to"):
        check_named(folder)


def check_named(folder: Path) -> None:
    """Raises with the place in front, as the user reads it."""
    try:
        check_weights(folder)
    except HalftuneError as error:
        raise ModelError(str(error), code="model.cannot_load") from error
