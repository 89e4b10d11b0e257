"""A Modelfile for Ollama, which does not run a GGUF file's chat template.

Ollama compares the template with a list of its own and takes the most similar one, or renders the question alone
(``detectChatTemplate`` in its server/model.go, 2026). So the Modelfile brings a template: what is put before and after
each role, which is found by rendering, and compared on several conversations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

MARKS = {"system": "zqsystem7", "user": "zquser7", "assistant": "zqanswer7"}
ROLES = ("system", "user", "assistant")
Messages = Sequence[Mapping[str, str]]

NO_TEMPLATE = (
    "# The chat template is no plain sequence of turns, and Ollama does not run the template in the GGUF file.\n"
    "# Write a TEMPLATE (docs.ollama.com/template), or serve the file with llama.cpp, which runs it.\n"
)


def modelfile(file: str, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], context: int) -> str:
    """Return the text of a Modelfile.

    Args:
        file: name of the GGUF file beside it.
        tokenizer: has the chat template.
        stops: the texts of the tokens that end an answer.
        context: tokens.
    """
    turns = _turns(tokenizer) if tokenizer.chat_template is not None else None
    lines = [f"FROM ./{file}"]
    if turns is not None:
        lines.append(f'TEMPLATE """{_go(turns)}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    lines.append(f"PARAMETER num_ctx {context}")
    note = NO_TEMPLATE if turns is None and tokenizer.chat_template is not None else ""
    return note + "\n".join(lines) + "\n"


Turns = dict[str, tuple[str, str]]
"""Role → the text before and after a message; ``""`` → before the conversation, and before an answer."""


def _turns(tokenizer: PreTrainedTokenizerBase) -> Turns | None:
    """What a template puts around each message; None if it does not render plain turns."""
    try:
        rendered = _render(tokenizer, [{"role": role, "content": MARKS[role]} for role in (*ROLES, "user")])
        alone = _render(tokenizer, [{"role": "user", "content": MARKS["user"]}])
        found = _split(tokenizer, rendered, alone)
        return found if found is not None and _holds(tokenizer, found) else None
    except (TemplateError, ValueError, TypeError):
        return None


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    asked: list[Any] = [dict(message) for message in messages]
    text = str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
    bos = tokenizer.bos_token
    return text.removeprefix(bos) if isinstance(bos, str) else text  # llama.cpp adds it


def _split(tokenizer: PreTrainedTokenizerBase, rendered: str, alone: str) -> Turns | None:
    system, user, answer = (MARKS[role] for role in ROLES)
    parts = rendered.replace(answer, user).replace(system, user).split(user)
    if len(parts) != 5 or alone.count(user) != 1:
        return None
    before, first, second, third, last = parts
    start, end = alone.split(user)
    if not first.endswith(start) or end != last:
        return None
    if not third.endswith(start) or second != end:
        return None
    after = third.removesuffix(start)
    closing = after if end.startswith(after) else ""  # of a question: that of an answer, if it can be told
    return {
        "system": (before, first.removesuffix(start)),
        "user": (start, closing),
        "assistant": (end.removeprefix(closing), after),
    }


def _holds(tokenizer: PreTrainedTokenizerBase, turns: Turns) -> bool:
    """Whether the turns are what the template renders, of several conversations."""
    talk = [{"role": role, "content": f"{role} {number}"} for number in range(3) for role in ("user", "assistant")]
    system = {"role": "system", "content": "be brief"}
    asked: list[Messages] = [talk[:1], talk[:3], talk[:5], [system, *talk[:1]], [system, *talk[:5]]]
    return all(_plain(turns, messages) == _render(tokenizer, messages) for messages in asked)


def _plain(turns: Turns, messages: Messages) -> str:
    """What the Go template of ``_go`` renders."""
    return "".join(_around(turns, one["role"], one["content"]) for one in messages) + turns["assistant"][0]


def _around(turns: Turns, role: str, content: str) -> str:
    before, after = turns[role]
    return f"{before}{content}{after}"


def _go(turns: Turns) -> str:
    branches = [
        f'{{{{ {word} eq .Role "{role}" }}}}{_around(turns, role, "{{ .Content }}")}'
        for word, role in zip(("if", "else if", "else if"), ROLES, strict=True)
    ]
    return f"{{{{ range .Messages }}}}{''.join(branches)}{{{{ end }}}}{{{{ end }}}}{turns['assistant'][0]}"
