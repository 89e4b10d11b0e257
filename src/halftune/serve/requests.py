"""Bodies of requests, as the OpenAI API has them, with some of vLLM's additions; what is not supported is refused."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    ValidationError,
)
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from halftune.config.sections.training import GenerationSection

_COLDEST = 1e-3  # temperatures below are greedy: logits divided by them may overflow
_RENDERERS = (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
# arguments, not variables of the template: `chat_template` is a program, whose time in a thread has no limit
_RESERVED = {"messages", "processor_kwargs"}.union(*(inspect.signature(call).parameters for call in _RENDERERS))
_TOP = 20  # the likeliest tokens with each token, at most, as OpenAI's

NonEmpty = Annotated[str, StringConstraints(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]


def _variable(name: str) -> str:
    if name in _RESERVED or name.startswith("return_"):
        raise ValueError(f"{name} is reserved")
    return name


def _only(given: Any) -> Any:
    """The prompt of a list with one."""
    return given[0] if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list) else given


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    match given:
        case {"type": "function", "function": {"name": str(name)}} if name:
            return given
    raise ValueError("a tool needs type: function and a function with a name")


Zero = Annotated[float, Field(ge=0, le=0)] | None


class ApiError(Exception):
    """An answer with an error, in OpenAI's form.

    Args:
        status: of HTTP.
        message: what is wrong.
        code: what kind of mistake, for programs.
        param: the field that it is about.
        retry_after: seconds after which to try again; None: no such header.
    """

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False


class _Request(BaseModel):
    """What both kinds of requests have. Fields of the last group do nothing here, and are accepted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: NonEmpty
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(ge=0.1, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], Field(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    n: Literal[1] | None = 1
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    def stops(self) -> list[str]:
        """Texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def settings(self, own: GenerationSection) -> GenerationSection:
        """The run's decoding settings with the request's."""
        names = ("temperature", "top_p", "repetition_penalty")
        asked = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.top_k is not None:
            asked["top_k"] = max(self.top_k, 0)  # vLLM's -1: all
        if asked.get("temperature", own.temperature) < _COLDEST:
            asked["temperature"] = 0
        return own.model_copy(update=asked)


class ChatRequest(_Request):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=_TOP)] | None = None
    tools: list[Annotated[dict[str, Any], AfterValidator(_tool)]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    chat_template_kwargs: dict[Annotated[str, AfterValidator(_variable)], str | int | float | bool | None] | None = None

    reasoning_effort: Any = None
    verbosity: Any = None

    @property
    def most(self) -> int | None:
        """Tokens of the answer at most, if the request says so."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limited_by(self) -> str:
        """The field that says how long prompt and answer are together."""
        given = (name for name in ("max_completion_tokens", "max_tokens") if getattr(self, name) is not None)
        return next(given, "messages")

    @property
    def top(self) -> int | None:
        """How many likeliest tokens are wanted; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []


class CompletionRequest(_Request):
    """Body of ``/v1/completions``."""

    prompt: Annotated[NonEmpty | Annotated[list[TokenId], Field(min_length=1)], BeforeValidator(_only)]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=_TOP)] | None = None
    echo: bool | None = False
    add_special_tokens: bool = True
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def most(self) -> int | None:
        """Tokens of the answer at most."""
        return self.max_tokens

    @property
    def limited_by(self) -> str:
        """The field that says how long prompt and answer are together."""
        return "prompt" if self.max_tokens is None else "max_tokens"

    @property
    def top(self) -> int | None:
        """How many likeliest tokens are wanted; None: no log-probabilities."""
        return self.logprobs


R = TypeVar("R", bound=_Request)


def read_request(kind: type[R], body: bytes) -> R:
    """The request in a body.

    Raises:
        ApiError: it is no valid JSON, or a field is wrong, unknown or not supported.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"][:1]) or None
        message = f"{place}: {first['msg']}" if place else first["msg"]
        raise ApiError(400, message, "invalid_request", place) from None


def read_messages(given: list[dict[str, Any]], *, developer: str) -> list[dict[str, Any]]:
    """Messages as templates expect them: a content of texts alone is one text, arguments of calls are objects.

    Args:
        given: of a request.
        developer: the role of OpenAI's ``developer`` in the template.

    Raises:
        ApiError: a message has no role or a content of another kind.
    """
    made = [_message(one, number) for number, one in enumerate(given)]
    return [{**one, "role": developer} if one["role"] == "developer" else one for one in made]


def _message(given: dict[str, Any], number: int) -> dict[str, Any]:
    role, content, calls = given.get("role"), given.get("content"), given.get("tool_calls")
    if not isinstance(calls, list | None):
        raise ApiError(400, f"messages.{number}: tool_calls is not a list", "invalid_request", "messages")
    if not isinstance(role, str) or not (isinstance(content, str | list) or (content is None and calls)):
        raise ApiError(400, f"messages.{number} needs a role and a content", "invalid_request", "messages")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    made = {**given, "content": content or ""}
    if calls:
        made["tool_calls"] = [_call(one, number) for one in calls]
    return made


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


class _Function(BaseModel):
    name: str
    arguments: str | dict[str, Any]


class _Call(BaseModel):
    model_config = ConfigDict(extra="allow")
    function: _Function


def _call(given: Any, number: int) -> dict[str, Any]:
    try:
        made = _Call.model_validate(given).model_dump()
        arguments = made["function"]["arguments"]
        made["function"]["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):  # of pydantic and of json
        what = f"messages.{number}: a tool call needs a function with name and JSON arguments"
        raise ApiError(400, what, "invalid_request", "messages") from None
    return made
