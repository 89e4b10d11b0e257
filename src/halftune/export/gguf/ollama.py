"""A Modelfile for Ollama, which does not run a GGUF file's chat template.

Ollama compares the template with a list of its own and takes the most similar one, or renders the question alone
(``detectChatTemplate`` in its server/model.go, 2026). So the Modelfile brings a Go template. It is made from what the
chat template renders of marked messages, and compared with the chat template on several conversations.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.data.templates.render import with_date, writes_date
from halftune.export.gguf.vocabulary import Vocabulary
from halftune.model.files.load_errors import TEMPLATE_ERRORS, first_line

log = get_logger(__name__)
MARKS = {"system": "zqsystem7", "user": "zquser7", "assistant": "zqanswer7"}
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
"""Keys of ``generation_config.json`` → parameters of a Modelfile."""
_PIECES = re.compile(r"<[^<>]*>|\s+|[^<\s]+|<")  # of a header: tokens such as <|user|>, white space, words
Messages = Sequence[Mapping[str, str]]
Render = Callable[[Messages], str]


@dataclass(frozen=True)
class Turns:
    """The texts that a chat template puts around messages; what llama.cpp adds itself is not in them.

    Attributes:
        system: before and after a system message; None if the template takes none.
        default: before the first question of a conversation without a system message.
        user: before and after a question.
        assistant: before and after an answer.
        prompt: before the answer that the model is to give.
    """

    system: tuple[str, str] | None
    default: str
    user: tuple[str, str]
    assistant: tuple[str, str]
    prompt: str

    def render(self, messages: Messages) -> str:
        """What Ollama makes of a conversation with :meth:`go`."""
        around = {"user": self.user, "assistant": self.assistant}
        system = "\n\n".join(one["content"] for one in messages if one["role"] == "system")
        before = self.system[0] + system + self.system[1] if self.system and system else self.default
        turns = (around[one["role"]] + (one["content"],) for one in messages if one["role"] in around)
        return before + "".join(f"{start}{content}{end}" for start, end, content in turns) + self.prompt

    def go(self) -> str:
        """The template for Ollama."""
        before, made = _literal(self.default), []
        if self.system:
            start, end = map(_literal, self.system)
            otherwise = before and f"{{{{ else }}}}{before}"
            before = f"{{{{ if .System }}}}{start}{{{{ .System }}}}{end}{otherwise}{{{{ end }}}}"
        for word, role in (("if", "user"), ("else if", "assistant")):
            start, end = map(_literal, self.user if role == "user" else self.assistant)
            made.append(f'{{{{ {word} eq .Role "{role}" }}}}{start}{{{{ .Content }}}}{end}')
        return f"{before}{{{{ range .Messages }}}}{''.join(made)}{{{{ end }}}}{{{{ end }}}}{_literal(self.prompt)}"


def find_turns(tokenizer: PreTrainedTokenizerBase, words: Vocabulary, variables: Mapping[str, Any]) -> Turns:
    """What a chat template puts around messages.

    Args:
        tokenizer: has the chat template.
        words: the vocabulary of the GGUF file, which says what llama.cpp adds to a prompt.
        variables: further variables of the template, as in training.

    Raises:
        ModelError: Ollama cannot render what the template renders; says why.
    """
    if tokenizer.chat_template is None:
        raise _differs("the tokenizer has no chat template")
    if words.add_eos:
        raise _differs(f"llama.cpp adds {tokenizer.eos_token} to every prompt")
    render = partial(_render, tokenizer, str(tokenizer.bos_token) if words.add_bos else "", variables)
    try:
        turns = _split(render, [words.tokens[index] for index in words.stops])
        _check(turns, render)
        _name_changes(turns, render)
    except TEMPLATE_ERRORS as error:
        raise _differs(f"the chat template refuses plain turns: {first_line(error)}") from error
    return turns


def _render(tokenizer: PreTrainedTokenizerBase, added: str, variables: Mapping[str, Any], messages: Messages) -> str:
    """The prompt for an answer, without the BOS token that llama.cpp adds."""
    asked: list[Any] = [dict(message) for message in messages]
    apply: Any = partial(tokenizer.apply_chat_template, asked, tokenize=False, add_generation_prompt=True, **variables)
    text, source = str(apply()), tokenizer.get_chat_template()
    if writes_date(source) and text != apply(chat_template=with_date(source, date(1999, 12, 31))):
        raise _differs("the chat template writes today's date")
    if not text.startswith(added):
        raise _differs(f"llama.cpp adds {added} before every prompt, and the chat template does not write it")
    return text.removeprefix(added)


def _split(render: Render, stops: Sequence[str]) -> Turns:
    default, reply, between, last = _between(render, "user", "assistant", "user")
    system, ends = None, [default, between]
    try:
        before, after, *_ = _between(render, "system", "user", "assistant", "user")
        ends.append(after)
    except (*TEMPLATE_ERRORS, ModelError):  # compared below, if the template leaves it out
        before = after = ""
    start = "".join(_common([_PIECES.findall(one)[::-1] for one in ends])[::-1])
    for stop in stops:  # an end of a turn is no part of the next one
        start = start.rpartition(stop)[2].lstrip() if stop in start else start
    if len(ends) == 3:
        system = (before, after.removesuffix(start))
    end = between.removesuffix(start)  # of an answer; mostly also that of a question
    closing = end if reply.startswith(end) and last.startswith(end) else "".join(_common([reply, last]))
    answer = (reply.removeprefix(closing), end)
    return Turns(system, default.removesuffix(start), (start, closing), answer, last.removeprefix(closing))


def _common(texts: Sequence[Sequence[str]]) -> list[str]:
    """What all texts begin with."""
    return [some[0] for some in takewhile(lambda some: len(set(some)) == 1, zip(*texts, strict=False))]


def _between(render: Render, *roles: str) -> list[str]:
    """The texts before, between and after messages of these roles."""
    marks = [MARKS[role] for role in roles]
    pieces = re.split(f"({'|'.join(MARKS.values())})", render([{"role": r, "content": MARKS[r]} for r in roles]))
    if pieces[1::2] != marks:
        raise _differs("the chat template moves, repeats or leaves out messages")
    return pieces[::2]


def _check(turns: Turns, render: Render) -> None:
    """Compare what Ollama renders with the chat template.

    Raises:
        ModelError: a conversation differs.
    """
    system = {"role": "system", "content": 'be brief:\n\n"1" <2> {{3}}'}
    talk = [{"role": role, "content": f"{role} {at}: it's"} for at in range(4) for role in ("user", "assistant")]
    for asked in ([*before, *talk[:count]] for before in ([], [system]) for count in (1, 3, 5, 7)):
        try:
            wanted = render(asked)
        except TEMPLATE_ERRORS:
            if asked[0] is not system or turns.system:
                raise
            continue  # no system message: said beside the template
        if turns.render(asked) != wanted:
            kind = "with" if asked[0] is system else "without"
            raise _differs(f"the chat template writes {len(asked)} messages {kind} a system message in another way")


def _name_changes(turns: Turns, render: Render) -> None:
    """Warn of what the chat template changes in messages; Ollama's templates write them as they are."""
    changes = {"changes the reasoning": "<think>\nso\n</think>\n\nyes", "changes white space at the ends": " yes \n"}
    for what, answer in changes.items():
        asked = [{"role": role, "content": answer} for role in ("user", "assistant", "user")]
        if turns.render(asked) != render(asked):
            log.warning("the chat template %s of earlier messages; Ollama's TEMPLATE keeps them as they are", what)


def _literal(text: str) -> str:
    """Text of a Go template inside three quotes: braces, quotes and characters that Ollama drops become strings."""
    return re.sub(r'\{+|"{3,}|[^\n\t\x20-\x7e]', _quoted, text)


def _quoted(found: re.Match[str]) -> str:
    text = found[0]
    return text if len(text) == 1 and text != "{" and text.isprintable() else f"{{{{ {json.dumps(text)} }}}}"


def _differs(why: str) -> ModelError:
    remedy = "serve the file with llama-server, or write a TEMPLATE (docs.ollama.com/template)"
    return ModelError(f"no template for Ollama: {why}", remedy=remedy, code="export.ollama_template")


def modelfile(file: str, turns: Turns | None, stops: Sequence[str], context: int, generation: Mapping[str, Any]) -> str:
    """Return the text of a Modelfile.

    Args:
        file: name of the GGUF file beside it.
        turns: for the template; None: write none.
        stops: the texts of the tokens that end an answer.
        context: tokens.
        generation: the model's ``generation_config.json``.
    """
    lines = [f"FROM ./{file}"]
    if turns is not None:
        lines.append(f'TEMPLATE """{turns.go()}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    lines += [f"PARAMETER {name} {value}" for name, value in _sampling(generation).items()]
    lines.append(f"PARAMETER num_ctx {context}")
    return "\n".join(lines) + "\n"


def _sampling(generation: Mapping[str, Any]) -> dict[str, int | float]:
    """The parameters that replace Ollama's own."""
    if generation.get("do_sample") is False:
        return {"temperature": 0}
    found = {name: generation.get(key) for key, name in SAMPLING.items() if generation.get("do_sample")}
    numbers = {name: one for name, one in found.items() if isinstance(one, int | float) and one is not True}
    return {name: one for name, one in numbers.items() if math.isfinite(one)}
