"""The tokenizer of a run: padding, templates, the ends of turns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_model import checkpoint, section

from halftune.core.errors import ModelError
from halftune.model.files.builtin import materialize
from halftune.model.tokenizer.tokenizer import end_of_turn_ids, load_tokenizer


def changed(tmp_path: Path, **settings: object) -> Path:
    """A copy of the builtin tokenizer with other settings; None removes one."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(materialize("qwen2-tiny"), folder)
    path = folder / "tokenizer_config.json"
    values = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


def test_builtin_pads_right_with_its_own_token() -> None:
    tokenizer = load_tokenizer(section("builtin:qwen2-tiny"))
    assert (tokenizer.pad_token, tokenizer.padding_side) == ("<|endoftext|>", "right")
    assert end_of_turn_ids(tokenizer) == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_a_template_that_ends_turns_with_another_token_than_eos(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        section(changed(tmp_path, eos_token="<|endoftext|>", extra_special_tokens=["<|im_end|>"]))
    )
    assert tokenizer.eos_token == "<|endoftext|>"
    assert end_of_turn_ids(tokenizer) == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])


def test_a_template_of_the_users(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}|{% endif %}{% endfor %}"
    )
    tokenizer = load_tokenizer(section("builtin:qwen2-tiny", chat_template=str(file)))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "a|b"


def test_templates_that_do_not_work(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read the chat template"):
        load_tokenizer(section("builtin:qwen2-tiny", chat_template=str(tmp_path / "none.jinja")))
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}")
    with pytest.raises(ModelError, match="not valid Jinja"):
        load_tokenizer(section("builtin:qwen2-tiny", chat_template=str(tmp_path / "bad.jinja")))


def test_chatml_needs_its_tokens(tmp_path: Path) -> None:
    folder = changed(tmp_path, eos_token="<|endoftext|>", extra_special_tokens=None)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|other|>"))
    with pytest.raises(ModelError) as error:
        load_tokenizer(section(folder, chat_template="chatml"))
    assert error.value.code == "model.template_tokens_missing"
    assert "'<|im_start|>'" in str(error.value)
    added = section(folder, chat_template="chatml", tokens={"add": ["<|im_start|>"]})
    assert "<|im_start|>" in load_tokenizer(added).get_vocab()


def test_damage_that_shows_only_in_use(tmp_path: Path) -> None:
    load_tokenizer(section("builtin:qwen2-tiny")).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": [1]}))
    with pytest.raises(ModelError, match=r"cannot load the tokenizer.*check the folder's tokenizer files"):
        load_tokenizer(section(tmp_path, tokenizer=str(tmp_path)))


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"set model\.tokenizer"):
        load_tokenizer(section(checkpoint(tmp_path / "model")))


def test_a_template_that_asks_for_too_much_is_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ 'a' * 3000000000 }}")
    with pytest.raises(ModelError, match="memory"):
        load_tokenizer(section(folder))
    with pytest.raises(ModelError, match="memory"):
        load_tokenizer(section("builtin:qwen2-tiny", chat_template=str(folder / "chat_template.jinja")))
