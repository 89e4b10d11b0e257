"""Renders conversations by the tokenizer's own chat template; its control tokens are told from the texts'."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from halftune.core.errors import DataError
from halftune.core.time_limit import OutOfTime, cpu_limit
from halftune.data.control import CLOSE, OPEN, ControlTokens, special_tokens
from halftune.data.conversation import RowDropped
from halftune.data.forms import TOOL, Forms, find_forms
from halftune.data.preflight import no_chat_template

Messages = Sequence[Mapping[str, Any]]
# `{% generation %}` without its meaning: writes a private character where a generated part begins and ends. An `if`
# block trims white space exactly as the original does.
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
# Tags that a template may look for in a text: `<think>`, `[INST]`.
_LITERAL = re.compile(r"""<[^<>\s'"]{1,40}>|\[/?\w+\]""")
# what a template raises that meets a shape which it does not expect, or asks for more than there is
_TRIPPED = (TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RecursionError, MemoryError)
_SECONDS = 30  # of CPU time for one conversation; usual templates take a thousandth
_QUESTION, _ANSWER = "Zq8 halftune asks 8qZ", "Zq7 halftune probe 7qZ"


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        tokenizer: a tokenizer with a chat template.
        variables: further variables of the template, e.g. ``{"enable_thinking": False}``.

    Raises:
        DataError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise no_chat_template(str(tokenizer.name_or_path))
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        self.forms = find_forms(lambda forms, messages, tools: self._render(messages, tools, forms=forms))
        self.control = ControlTokens(special_tokens(tokenizer, self._frame()))
        self.has_generation = bool(_GENERATION.search(self.source(None)))
        self.headers, self.end_tokens = self._probe()
        tags = sorted({*_LITERAL.findall(self.source([])), *_LITERAL.findall(self.source(None))}, key=len, reverse=True)
        self.literals = re.compile(f"({'|'.join(map(re.escape, tags)) or '(?!)'})")

    def source(self, tools: list[dict[str, Any]] | None) -> str:
        """The Jinja source that is used for a conversation with these tools."""
        try:
            return self._tokenizer.get_chat_template(tools=tools)
        except ValueError as error:  # several named templates, and none of them is the default
            raise DataError(
                f"no chat template can be chosen: {str(error).splitlines()[0]}",
                where=str(self._tokenizer.name_or_path),
                remedy="set model.chat_template",
            ) from error

    def render(self, messages: Messages, tools: list[dict[str, Any]] | None = None, *, prompt: bool = False) -> str:
        """Renders marked messages; the result has aliases for control tokens.

        Args:
            messages: marked by ``control.mark``.
            tools: marked too.
            prompt: end with the header of the answer that is to come.

        Raises:
            RowDropped: the template refuses the conversation.
        """
        return self.control.alias(self._render(messages, tools, prompt=prompt))

    def render_generation(
        self, messages: Messages, tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders by a template with ``{% generation %}``: the text, and the (start, end) characters generated."""
        source = _GENERATION.sub(_marker, self.source(tools))
        text = self.control.alias(self._render(messages, tools, chat_template=source))
        pieces, spans, start, length = re.split(f"([{OPEN}{CLOSE}])", text), [], 0, 0
        for piece in pieces:
            if piece == OPEN:
                start = length
            elif piece == CLOSE:
                spans.append((start, length))
            else:
                length += len(piece)
        return re.sub(f"[{OPEN}{CLOSE}]", "", text), spans

    def _render(
        self,
        messages: Messages,
        tools: Any = None,
        *,
        prompt: bool = False,
        forms: Forms | None = None,
        **options: Any,
    ) -> str:
        forms = forms or self.forms
        try:
            with cpu_limit(_SECONDS):
                return self._tokenizer.apply_chat_template(
                    [forms.of_message(message) for message in messages],
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **self._variables,
                    **options,
                )  # type: ignore[return-value]
        except OutOfTime as error:
            what = f"the chat template takes more than {_SECONDS} s of CPU time for one conversation"
            where = str(self._tokenizer.name_or_path)
            raise DataError(what, where=where, remedy="set model.chat_template to one that you trust") from error
        except TemplateError as error:
            raise RowDropped(f"the chat template refuses it: {str(error)[:200] or type(error).__name__}") from error
        except _TRIPPED as error:
            raise RowDropped(f"the chat template cannot render it: {str(error)[:200]}") from error

    def _frame(self) -> str:
        question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
        try:
            return self._render([question, answer, question])
        except RowDropped:
            return ""

    def _probe(self) -> tuple[tuple[str, ...], frozenset[str]]:
        """What the template writes in front of an answer that is not the last turn, and which tokens end a turn.

        The header comes whole, and as far as a prompt writes it.
        """
        question, answer = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}
        headers, ends = list[str](), set()
        if self._tokenizer.eos_token in self.control.tokens:
            ends.add(self.control.alias_of(str(self._tokenizer.eos_token)))
        for tools in (None, [TOOL]):  # some templates are for conversations with tools only
            try:
                before, prompt = self.render([question], tools), self.render([question], tools, prompt=True)
                middle = self.render([question, answer, question], tools)
                last = self.render([question, answer], tools)
                break
            except RowDropped:
                continue
        else:
            return (), frozenset(ends)
        # What follows the last answer closes it. What follows an earlier one may open the next turn instead, unless it
        # closes a last turn too. A template that ends no last turn by a control token ends none.
        if closing := self._first_control(last, _ANSWER):
            ends.add(closing)
            earlier = self._first_control(middle, _ANSWER)
            if earlier and earlier == self._first_control(before, _QUESTION):
                ends.add(earlier)
        if _ANSWER in middle:
            between, after, asked = (
                text.partition(_QUESTION)[2].partition(_ANSWER)[0] for text in (middle, before, prompt)
            )
            closing = after if between.startswith(after) else ""  # of the question
            header = between[len(closing) :]
            headers = [header, header[: shared(header, asked[len(closing) :])]]
        return tuple(header for header in headers if any(map(self.control.is_alias, header))), frozenset(ends)

    def _first_control(self, rendered: str, text: str) -> str:
        """The first control token behind a text, "" where there is none."""
        return next(filter(self.control.is_alias, rendered.partition(text)[2]), "")


def _marker(match: re.Match[str]) -> str:
    before, end, after = match.groups()
    return f"{{%{before} if true %}}{CLOSE if end else OPEN}{{% endif {after}%}}"


def shared(one: str, other: str) -> int:
    """How many characters two texts begin with that are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
