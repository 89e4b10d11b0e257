"""Loads the tokenizer of a run, with pad token, configured chat template and end-of-turn tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from jinja2 import Environment
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from halftune.config.facts.folder import check_code, check_tokenizer
from halftune.config.sections.model import ModelSection, TokensSection
from halftune.core.errors import ModelError
from halftune.core.files import read_limited
from halftune.core.log import get_logger
from halftune.core.processes.template_probe import LENGTH, excess
from halftune.model.files.architectures import own_architectures
from halftune.model.files.load_errors import TEMPLATE_ERRORS, first_line
from halftune.model.files.locate import locate_tokenizer
from halftune.model.tokenizer.added_tokens import add_tokens

log = get_logger(__name__)

# Unused tokens of common vocabularies that can serve as pad token, in order of preference.
PAD_CANDIDATES = ("<|endoftext|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|pad|>", "<unk>")
# Parts that mistral-common's own Jinja takes for sounds, and the same with transformers' name for one
SOUNDS = ("['input_audio', 'audio_url']", "['input_audio', 'audio_url', 'audio']")
# transformers' tag around assistant text; unknown to plain Jinja
GENERATION_TAG = re.compile(r"{%-?\s*(end)?generation\s*-?%}")


def load_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    """Load a run's tokenizer: right padding, a pad token and the configured chat template.

    Raises:
        ModelError: it cannot be loaded, or the configured template does not fit it.
    """
    folder = locate_tokenizer(model)
    check_tokenizer(folder)
    # remote code of another hub repository is not pinned
    pinned = model.tokenizer is None or Path(model.tokenizer).is_dir()
    if pinned:
        check_code(folder, model)
    try:
        with own_architectures():
            remote = model.trust_remote_code and pinned
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=remote, **_of_mistral(folder))
        tokenizer("a")  # some invalid values, such as a list as model_max_length, fail only in use
    except Exception as error:  # the tokenizers library raises nothing more precise
        first = first_line(error)
        remedy = "check the folder's tokenizer files, or set model.tokenizer to another one"
        if isinstance(error, StrictDataclassError):  # transformers reads it for the tokenizer's class
            raise ModelError(
                first, where=str(folder), remedy="download the checkpoint again", code="model.tokenizer_invalid"
            ) from error
        if "trust_remote_code" in str(error):
            first = "it requires remote code"
            remedy = "review the code, then set model.tokenizer to a local copy and model.trust_remote_code: true"
        what = f"cannot load the tokenizer: {first}"
        raise ModelError(what, where=str(folder), remedy=remedy, code="model.tokenizer_invalid") from error
    _check_unknown(tokenizer, str(folder))
    tokenizer.padding_side = "right"
    if model.tokens != TokensSection():
        add_tokens(tokenizer, model.tokens)
    _set_pad_token(tokenizer)
    if model.chat_template is not None or tokenizer.chat_template is None:
        _set_template(tokenizer, model.chat_template)
    else:
        _check_template(tokenizer.chat_template, str(folder))
        if isinstance(tokenizer.chat_template, str):
            tokenizer.chat_template = tokenizer.chat_template.replace(*SOUNDS)
    return tokenizer


def _of_mistral(folder: Path) -> dict[str, Any]:
    """Options with which transformers turns Mistral's own format, ``tekken.json``, into a fast tokenizer."""
    if not (folder / "tekken.json").is_file():
        return {}
    named = (folder / "tokenizer.json").is_file()
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return {"mistral_format": False} | ({} if named else tokens)


def _check_template(template: Any, where: str) -> None:
    """Check that chat templates can be parsed and render within limits.

    Raises:
        ModelError: invalid Jinja, or a limit is exceeded.
    """
    remedy = "copy the tokenizer again, or set model.chat_template"
    for text in template.values() if isinstance(template, dict) else [template]:
        try:
            too_much = excess(text)  # first, since parsing has no limit
            if not too_much:
                Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION_TAG.sub("", text))
        except TEMPLATE_ERRORS as error:
            what = f"the chat template is not valid Jinja: {first_line(error)}"
            raise ModelError(what, where=where, remedy=remedy, code="model.chat_template_invalid") from error
        if too_much:
            trusted = "set model.chat_template to a template that you trust"
            what = f"the chat template {too_much}"
            raise ModelError(what, where=where, remedy=trusted, code="model.chat_template_too_costly")


def _set_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.pad_token_id is not None:
        return
    vocabulary = tokenizer.get_vocab()
    unused = [token for token in PAD_CANDIDATES if token in vocabulary and token != tokenizer.eos_token]
    tokenizer.pad_token = unused[0] if unused else tokenizer.eos_token
    if tokenizer.pad_token is None:
        remedy = "set model.tokenizer to one with a pad or EOS token"
        what = "the tokenizer has neither a pad nor an EOS token"
        raise ModelError(what, remedy=remedy, code="model.tokenizer_without_eos")
    # harmless in training: padding is masked by position, not by token id
    log.info("the tokenizer has no pad token: padding with %s", tokenizer.pad_token)


def _set_template(tokenizer: PreTrainedTokenizerBase, asked: str | None) -> None:
    """Set the configured template; without any, the one that the vocabulary supports."""
    from halftune.config.chat_templates import find_template  # a table that most runs do not need
    from halftune.model.tokenizer.named_templates import choose_template, use_template

    if asked is None:
        choose_template(tokenizer)
    elif row := find_template(asked):
        use_template(tokenizer, row)
    else:
        tokenizer.chat_template = _read_template(asked)


def _read_template(asked: str) -> str:
    path = Path(asked)
    try:
        text = read_limited(path, LENGTH).decode()
    except (OSError, UnicodeDecodeError) as error:
        remedy = "use a name of docs/reference/chat-templates.md, or the path of a Jinja file"
        what = f"cannot read the chat template: {first_line(error)}"
        raise ModelError(what, where=asked, remedy=remedy, code="model.chat_template_invalid") from error
    _check_template(text, asked)
    return text


def _check_unknown(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    try:
        list(tokenizer.all_special_ids)
    except RecursionError as error:  # transformers looks up the unknown token as an unknown word
        what = f"unk_token {tokenizer.unk_token!r} is not in the tokenizer's vocabulary"
        remedy = "correct unk_token in tokenizer_config.json, or copy the tokenizer again"
        raise ModelError(what, where=where, remedy=remedy, code="model.tokenizer_invalid") from error


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that end a reply: EOS and the token with which the chat template ends a turn.

    Base checkpoints often have ``<|endoftext|>`` as EOS while their template ends turns with another token: stopping at
    EOS only would generate beyond the reply.
    """
    found: list[int] = []
    if tokenizer.chat_template is not None:
        probe = "zq7"
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": probe}]
        try:
            rendered = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except TEMPLATE_ERRORS as error:
            what = f"the chat template cannot render a conversation: {first_line(error)}"
            remedy = "copy the tokenizer again, or set model.chat_template"
            raise ModelError(
                what, where=str(tokenizer.name_or_path), remedy=remedy, code="model.chat_template_invalid"
            ) from error
        tail = rendered[rendered.rfind(probe) + len(probe) :] if probe in rendered else ""
        special = set(tokenizer.all_special_ids)
        found += [token for token in tokenizer.encode(tail, add_special_tokens=False) if token in special][:1]
    if isinstance(tokenizer.eos_token_id, int):
        found.append(tokenizer.eos_token_id)
    return list(dict.fromkeys(found))
