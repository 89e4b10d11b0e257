"""Renders conversations with the tokenizer's chat template, keeping its control tokens apart from message texts.

Templates that print the date (``strftime_now``) see one date, so a resumed run renders the same text.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.utils import Namespace
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from halftune.core.errors import DataError
from halftune.core.processes.time_limit import Limits, OutOfTime
from halftune.data.formats.conversation import RowDropped, RowError, no_chat_template
from halftune.data.templates.control_tokens import CLOSE, MEDIA, OPEN, ControlTokens, special_tokens
from halftune.data.templates.features import REASONING_KEYS, TOOL, TemplateFeatures, probe_features

_CALL = "strftime_now"
# strftime directives. `%-d` is `%d` without a leading zero; `%%` is replaced last, after all other directives.
_DIRECTIVES = (*(f"%-{letter}" for letter in "dmHIMSjy"), *(f"%{letter}" for letter in "aAbBcdDeFHIjmMpSTuUwWxXyY%"))


def writes_date(template: str) -> bool:
    """Whether a chat template prints the current date."""
    return _CALL in template


@lru_cache(maxsize=8)
def with_date(template: str, day: date) -> str:
    """Return the template with the current time replaced by midnight of ``day``.

    A macro in the template shadows the function: transformers passes no callables to templates.
    """
    moment = datetime.combine(day, time())
    pairs = ((directive, moment.strftime(directive)) for directive in _DIRECTIVES)
    filters = "".join(f"|replace({json.dumps(old)},{json.dumps(new)})" for old, new in pairs)
    return f"{{% macro {_CALL}(format) %}}{{{{ format{filters} }}}}{{% endmacro +%}}{template}"


Messages = Sequence[Mapping[str, Any]]
# in templates of our own whose format defines no tools
WITHOUT_TOOLS = '{%- set tool_style = "" -%}'
# Replaces `{% generation %}`: writes a private-use character at the start and end of a generated part. An `if` block
# trims white space exactly as the original does.
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
# Tags that a template may search for in a text: `<think>`, `[INST]`.
_LITERAL = re.compile(r"""<[^<>\s'"]{1,40}>|\[/?\w+\]""")
# errors of templates that do not support the shape of a message
_TRIPPED = (TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RecursionError)
# CPU time and bytes of memory for one conversation; usual templates take a thousandth
_SECONDS, _MEMORY = 30, 1 << 30
TRUSTED = "set model.chat_template to a template that you trust"
_QUESTION, _ANSWER = "Zq8 halftune asks 8qZ", "Zq7 halftune probe 7qZ"


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        tokenizer: a tokenizer with a chat template.
        variables: further variables of the template, e.g. ``{"enable_thinking": False}``.
        day: the date for templates that print today's date; None for the current date.
        images: give the template a part for every character of ``MEDIA`` in a text.

    Raises:
        DataError: the tokenizer has no chat template, or the template exceeds the time or memory limit.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        variables: Mapping[str, Any] | None = None,
        day: date | None = None,
        *,
        images: bool = False,
    ) -> None:
        if not tokenizer.chat_template:
            raise no_chat_template(str(tokenizer.name_or_path))
        self._tokenizer, self._images = tokenizer, images
        self._variables, self._day = dict(variables or {}), day
        self._fixed = _fixed_variables(tokenizer, self._variables)
        self._plain: Template | None = None  # for plain messages without tools
        try:
            self.features = probe_features(
                lambda features, messages, tools: self._render(messages, tools, features=features),
                names_developer="developer" in self.source(None),
            )
            self.control = ControlTokens(special_tokens(tokenizer, self._frame()))
            self.has_generation = bool(_GENERATION.search(self.source(None)))
            self.headers, self.end_tokens = self._probe()
        except RowError as error:
            where = str(tokenizer.name_or_path)
            raise DataError(
                error.what, where=where, remedy=error.remedy, code="model.chat_template_too_costly"
            ) from error
        tags = sorted({*_LITERAL.findall(self.source([])), *_LITERAL.findall(self.source(None))}, key=len, reverse=True)
        self.literals = re.compile(f"({'|'.join(map(re.escape, tags)) or '(?!)'})")

    def source(self, tools: list[dict[str, Any]] | None) -> str:
        """The Jinja source for a conversation with these tools."""
        try:
            source = self._tokenizer.get_chat_template(tools=tools)
        except ValueError as error:  # several named templates without a default
            raise DataError(
                f"ambiguous chat template: {str(error).splitlines()[0]}",
                where=str(self._tokenizer.name_or_path),
                remedy="set model.chat_template",
                code="model.chat_template_missing",
            ) from error
        return with_date(source, self._day) if self._day and writes_date(source) else source

    @property
    def refuses_tools(self) -> bool:
        """Whether it is a template of ours whose format defines no tools."""
        return WITHOUT_TOOLS in self.source(None)

    def render(self, messages: Messages, tools: list[dict[str, Any]] | None = None, *, prompt: bool = False) -> str:
        """Render marked messages; control tokens become aliases.

        Args:
            messages: marked with ``control.mark``.
            tools: marked too.
            prompt: add the generation prompt.

        Raises:
            RowDropped: the template rejects the conversation.
            RowError: the template exceeds the time or memory limit.
        """
        return self.control.alias(self._render(messages, tools, prompt=prompt))

    def render_all(
        self, conversations: Sequence[Messages], tools: list[dict[str, Any]] | None, *, prompt: bool = False
    ) -> Callable[[int], str]:
        """Render several marked conversations with the same tools; returns a function of their index.

        One batched call costs half. If the template rejects one of them, each is rendered on demand.
        """
        try:
            made = [self.control.alias(text) for text in self._render_several(conversations, tools, prompt=prompt)]
        except RowDropped:
            return lambda index: self.render(conversations[index], tools, prompt=prompt)
        return made.__getitem__

    def render_generation(
        self, messages: Messages, tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render with a ``{% generation %}`` template: the text, and (start, end) characters of generated parts."""
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

    def _render(self, messages: Messages, tools: Any = None, **options: Any) -> str:
        return self._render_several([messages], tools, **options)[0]

    def _render_several(
        self,
        conversations: Sequence[Messages],
        tools: Any = None,
        *,
        prompt: bool = False,
        features: TemplateFeatures | None = None,
        **options: Any,
    ) -> list[str]:
        if not conversations:
            return []
        if self._day:
            options.setdefault("chat_template", self.source(tools))
        try:
            with conversation_limits():
                made = self._prepared(conversations, features or self.features)
                if self._fixed is not None and tools is None and all(map(_is_plain, made)):
                    template = self._compiled(options.get("chat_template"))
                    given = {**self._fixed, "add_generation_prompt": prompt}
                    return [template.render(given, messages=messages) for messages in made]
                apply: Callable[..., list[str]] = self._tokenizer.apply_chat_template  # type: ignore[assignment]
                given = {"tokenize": False, "add_generation_prompt": prompt}
                return apply(made, tools=tools, **given, **self._variables, **options)
        except (OutOfTime, MemoryError) as error:
            raise too_much(error) from error
        except TemplateError as error:
            raise RowDropped(f"rejected by the chat template: {str(error)[:200] or type(error).__name__}") from error
        except _TRIPPED as error:
            raise RowDropped(f"the chat template cannot render the row: {str(error)[:200]}") from error

    def _compiled(self, source: str | None) -> Template:
        if source is not None:
            return _compiled(source)
        if self._plain is None:
            self._plain = _compiled(self.source(None))
        return self._plain

    def _prepared(self, conversations: Sequence[Messages], features: TemplateFeatures) -> list[list[dict[str, Any]]]:
        """The messages as the template takes them: what it does not support is written in another way."""
        made = [[features.of_message(message) for message in messages] for messages in conversations]
        if not self._images:
            return made
        return [[_with_images(message) for message in messages] for messages in made]

    def _frame(self) -> str:
        question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
        try:
            return self._render([question, answer, question])
        except RowDropped:
            return ""

    def _probe(self) -> tuple[tuple[str, ...], frozenset[str]]:
        """The headers of an answer that is not the last turn, and the end-of-turn tokens."""
        question, answer = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}
        ends = set[str]()
        if self._tokenizer.eos_token in self.control.tokens:
            ends.add(self.control.alias_of(str(self._tokenizer.eos_token)))
        for tools in (None, [TOOL]):  # some templates support conversations with tools only
            try:
                before, prompt = self.render([question], tools), self.render([question], tools, prompt=True)
                middle = self.render([question, answer, question], tools)
                last = self.render([question, answer], tools)
                break
            except RowDropped:
                continue
        else:
            return (), frozenset(ends)
        # A token after the last answer closes it. A token after an earlier answer may open the next turn instead,
        # unless it also closes a last turn. A template without an end token on the last turn has none.
        if closing := self._first_control(last, _ANSWER):
            ends.add(closing)
            earlier = self._first_control(middle, _ANSWER)
            if earlier and earlier == self._first_control(before, _QUESTION):
                ends.add(earlier)
        return self._headers(middle, before, prompt), frozenset(ends)

    def _headers(self, middle: str, before: str, prompt: str) -> tuple[str, ...]:
        """The header of the answer in ``middle``, whole and as the prefix that the generation prompt writes."""
        if _ANSWER not in middle:
            return ()
        between, after, asked = (
            text.partition(_QUESTION)[2].partition(_ANSWER)[0] for text in (middle, before, prompt)
        )
        closing = after if between.startswith(after) else ""  # of the question
        header = between[len(closing) :]
        headers = header, header[: shared(header, asked[len(closing) :])]
        return tuple(one for one in headers if any(map(self.control.is_alias, one)))

    def _first_control(self, rendered: str, text: str) -> str:
        """The first control token after a text, or ""."""
        return next(filter(self.control.is_alias, rendered.partition(text)[2]), "")


def conversation_limits() -> Limits:
    """CPU and memory limits of rendering one conversation."""
    return Limits(_SECONDS, _MEMORY)


def too_much(error: BaseException) -> RowError:
    """The error for a conversation that exceeds a limit."""
    limit = f"{_SECONDS} s of CPU time" if isinstance(error, OutOfTime) else f"{_MEMORY >> 30} GiB of memory"
    return RowError(f"the chat template needs more than {limit} for one conversation", TRUSTED)


def _fixed_variables(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> dict[str, Any] | None:
    """What ``apply_chat_template`` gives a template beside plain messages; None if that takes more than passing it on.

    Calling a compiled template with these takes two thirds of the time of ``apply_chat_template``.
    """
    own = PreTrainedTokenizerBase.apply_chat_template
    taken = {*inspect.signature(own).parameters, "messages", "conversations"}
    values = {**tokenizer.special_tokens_map, **variables}
    plain = all(value is None or type(value) in (str, int, float, bool) for value in values.values())
    if type(tokenizer).apply_chat_template is not own or not plain or taken & variables.keys():
        return None
    return {**values, "tools": None, "documents": None}


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    """The template as ``apply_chat_template`` compiles it, with faster access to globals, keys, loops and macros."""
    environment: Any = _compile_jinja_template(source).environment.overlay()
    sandboxed, sandboxed_call, attributes = environment.getattr, environment.call, frozenset(dir(dict))

    def read(obj: Any, attribute: str) -> Any:
        # ``getattr`` tries the attribute before the key; a failed attempt takes as long as half a rendering
        if type(obj) is dict and attribute not in attributes and attribute in obj:
            return obj[attribute]
        if type(obj) in (LoopContext, Namespace) and attribute[0] != "_":  # of jinja itself, and nothing changes them
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return sandboxed(obj, attribute)

    def call(context: Context, obj: Any, *args: Any, **names: Any) -> Any:
        if type(obj) is not Macro:
            return sandboxed_call(context, obj, *args, **names)
        names.pop("_loop_vars", None)
        names.pop("_block_vars", None)
        return obj(context.eval_ctx, *args, **names)

    environment.getattr, environment.call = read, call
    template = environment.from_string(source)
    template.globals = dict(template.globals)  # a ChainMap, which each rendering copies
    return template


def _with_images(message: dict[str, Any]) -> dict[str, Any]:
    """The message; one with a character of ``MEDIA`` in its text has a list of parts."""
    content = message.get("content")
    text = content if isinstance(content, str) else "".join(part["text"] for part in content or ())
    if not any(one in text for one in MEDIA):
        return message
    pieces = re.split(f"([{''.join(MEDIA)}])", text)
    parts = [{"type": MEDIA[one]} if one in MEDIA else {"type": "text", "text": one} for one in pieces if one]
    return {**message, "content": parts}


def _is_plain(messages: Messages) -> bool:
    """Whether ``apply_chat_template`` passes messages on unchanged: texts only, and no reasoning."""
    for message in messages:
        if not message.keys().isdisjoint(REASONING_KEYS) or {*map(type, message.values())} != {str}:
            return False
    return True


def _marker(match: re.Match[str]) -> str:
    before, end, after = match.groups()
    return f"{{%{before} if true %}}{CLOSE if end else OPEN}{{% endif {after}%}}"


def shared(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
