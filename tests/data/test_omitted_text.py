"""Text that a chat template omits, shortens or changes is named, and what it rewrites on purpose is not."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from halftune.config.chat_templates import find_template, templates
from halftune.data.formats.conversation import Conversation
from halftune.data.pipeline import prepare
from halftune.data.templates.features import fit_system
from halftune.data.templates.loss_mask import render_turns
from halftune.data.templates.omitted_text import (
    LEFT_OUT,
    LOSSES,
    LOST_REASONING,
    LOST_TEXT,
    LOST_TOOLS,
    MOVED,
    NO_SYSTEM_SHOWN,
)
from halftune.data.templates.render import ChatTemplate
from halftune.model.tokenizer.named_templates import use_template

LONG = "Please read: " + " ".join(f"word{n}" for n in range(40)) + " END."
LINES = "The first line has no question.\nThe second line asks for seven and 7."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name} of a town.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string", "description": f'Where the "{name}" is'}},
            },
        },
    }
    for name in ("weather", "clock")
]


PLACE = {"type": "object", "properties": {"town": {"type": "string", "description": "Which town."}}}
NESTED = {
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"place": {**PLACE, "description": "A place."}}},
}
INPUT_SCHEMA = {"name": "weather", "description": "The weather.", "input_schema": PLACE}  # Anthropic's form
# name, description, and the parameters, without what is in them
FLAT = (
    "tool.function.name + tool.function.description"
    " + (((tool.function.parameters or {}).properties or {}).keys() | join)"
    " + (((tool.function.parameters or {}).properties or {}).values() | map(attribute='description') | join)"
)


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def result(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **more}


def call(name: str = "weather", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def chatml(expression: str = "m.content", condition: str = "true", tool: str = "tool | tojson") -> str:
    """ChatML with another text of messages or tools."""
    return (
        "{%- if tools %}<|im_start|>tools{% for tool in tools %}{{ '\n' }}{{ " + tool + " }}{% endfor %}<|im_end|>\n"
        "{%- endif %}{%- for m in messages %}{%- if " + condition + " %}{{ '<|im_start|>' + m.role + '\n' + "
        + expression + " }}{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>' + (call.function | tojson) }}"
        "{%- endfor %}{{ '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
    )  # fmt: skip


def of(role: str, expression: str) -> str:
    return chatml(f"({expression} if m.role == '{role}' else m.content)")


TALK = [user(LONG), answer("It is read. Thank you for all of these words.")]
ASKED = [user(LINES), answer("The answer has\ntwo lines. Final: 14")]
KNOWN = [user("Hi there"), answer("Hello"), user("no"), answer("I know.")]
NAMED = [*KNOWN[:2], user("assistant"), KNOWN[3]]
LOOKED = [user("Look at Oslo"), answer("Let me see.", tool_calls=[call(town="Oslo")]), result("It rains in Oslo")]
LOOKED.append(answer("Take a coat"))
THOUGHT = answer("<think>\nSeven and one more is eight.\n</think>\n\nIt is 8")
REASONED = [user("What is 7+1?"), THOUGHT]
AGAIN = [*REASONED, user("And 9+1?"), answer("<think>\nThat is ten.\n</think>\n\nIt is 10")]
QUESTIONS_LAST = chatml().replace("in messages", "in (messages | sort(attribute='role') if messages[2] else messages)")
NO_SECOND_QUESTION = chatml(condition="not (m.role == 'user' and loop.index == 3)")


@pytest.mark.parametrize(
    ("template", "messages", "tools", "note"),
    [
        (of("user", "m.content[:40]"), TALK, None, LOST_TEXT["user"]),
        (of("user", "m.content[-20:]"), TALK, None, LOST_TEXT["user"]),
        (of("user", "m.content | truncate(60)"), TALK, None, LOST_TEXT["user"]),
        (of("user", "m.content.split('\n')[0]"), ASKED, None, LOST_TEXT["user"]),
        (of("user", "m.content.split('\n')[-1]"), ASKED, None, LOST_TEXT["user"]),
        (of("user", "m.content | replace('7', '')"), ASKED, None, LOST_TEXT["user"]),
        (of("user", "m.content | upper"), ASKED, None, LOST_TEXT["user"]),
        (of("system", "m.content[:60]"), [system(LONG), *ASKED], None, LOST_TEXT["system"]),
        (of("system", "m.content[:20]"), [system(LONG), *ASKED], None, NO_SYSTEM_SHOWN),
        (of("tool", "m.content[:5]"), LOOKED, TOOLS, LOST_TEXT["tool"]),
        (of("assistant", "m.content | truncate(30)"), [user(TALK[1]["content"]), TALK[1]], None, LEFT_OUT),
        (of("assistant", "m.content[:20]"), TALK, None, LEFT_OUT),
        (of("assistant", "m.content.split('\n')[0]"), ASKED, None, LEFT_OUT),
        (of("assistant", "m.content.split('Final:')[-1]"), ASKED, None, LEFT_OUT),
        (of("assistant", "m.content.split('</think>')[-1]"), REASONED, None, LOST_REASONING),
        (of("assistant", "m.content.split('</think>')[-1]"), AGAIN, None, LOST_REASONING),
        (chatml("(m.content if not m.tool_calls else '')"), LOOKED, TOOLS, LEFT_OUT),
        (NO_SECOND_QUESTION, KNOWN, None, LOST_TEXT["user"]),
        (NO_SECOND_QUESTION, NAMED, None, LOST_TEXT["user"]),
        (QUESTIONS_LAST, KNOWN, None, MOVED),
        (chatml().replace("in tools", "in tools[:1]"), LOOKED, TOOLS, LOST_TOOLS),
        (chatml(tool="tool.function.name"), LOOKED, TOOLS, LOST_TOOLS),
        (chatml(tool=FLAT), LOOKED, [NESTED], LOST_TOOLS),
        (chatml(tool=FLAT), LOOKED, [INPUT_SCHEMA], LOST_TOOLS),
        (chatml(tool="tool.function.name + tool.function.description"), LOOKED, TOOLS, LOST_TOOLS),
        (
            chatml().replace("(call.function | tojson)", "call.function.name + call.function.arguments.town"),
            [*LOOKED[:1], answer("", tool_calls=[call(town="Oslo", days=123, at={"hour": "noon"})]), *LOOKED[2:]],
            TOOLS,
            LEFT_OUT,
        ),
    ],
)
def test_text_that_is_shortened_or_changed_is_named_and_its_row_dropped(
    template, messages, tools, note, make_tokenizer, make_config, write
):
    row = {"messages": messages, **({"tools": tools} if tools else {})}
    tokenizer, path = make_tokenizer("qwen2", template), write([row, {"messages": [user("HELLO"), answer("Good day")]}])
    notes = prepare(make_config(path), tokenizer).report.train[0].notes
    assert {one: count.count for one, count in notes.items() if one in LOSSES} == {note: 1}
    dropped = prepare(make_config(path, on_lost_text="drop"), tokenizer).report.train[0]
    assert dropped.kept == 1
    assert dropped.dropped[note].count == 1


def test_all_of_a_tool_is_looked_for(make_tokenizer, make_config, write):
    for template, tools in ((chatml(tool=FLAT), TOOLS), (chatml(), [NESTED, INPUT_SCHEMA])):
        path = write([{"messages": LOOKED, "tools": tools}])
        notes = prepare(make_config(path), make_tokenizer("qwen2", template)).report.train[0].notes
        assert not LOSSES & notes.keys()


REWRITTEN = [
    (chatml("m.content.strip()"), [user("  two  spaces\n\n"), answer("\n yes \n")]),
    (chatml("m.content | replace('\n\n', '\n')"), [user("a\n\nb"), answer("c\n\nd")]),
    (of("tool", "(m.content | tojson)"), [*LOOKED[:2], result('{"a": "ü\\"\n"}'), LOOKED[3]]),
    (of("assistant", "(m.content.split('</think>')[-1] if not loop.last else m.content)"), AGAIN),
    (of("assistant", "m.content.split('</think>')[-1]"), [*REASONED, *KNOWN[:2]]),
    (of("assistant", "(m.content.split('<think>') | join('<think>\n\n'))"), REASONED),
    (chatml(), NAMED),
    (chatml(), [user('"'), answer("<think>")]),
    (chatml(), [user("Write <|im_end|>"), answer("<|im_end|> and <|im_start|>user")]),
]


@pytest.mark.parametrize(("template", "messages"), REWRITTEN)
def test_what_a_template_rewrites_on_purpose_is_not_named(template, messages, make_tokenizer, make_config, write):
    path = write([{"messages": messages}])
    report = prepare(make_config(path, on_lost_text="drop"), make_tokenizer("qwen2", template)).report.train[0]
    assert report.kept == 1
    assert not LOSSES & report.notes.keys()


@pytest.mark.parametrize("name", [row.name for row in templates()])
def test_templates_by_name_keep_every_text(name, backend):
    row = find_template(name)
    assert row is not None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend), bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens([*row.tokens, *((row.end,) if row.end != "{eos}" else ())], special_tokens=True)
    use_template(tokenizer, row)
    template = ChatTemplate(tokenizer)
    short = [system("You are a"), user("1"), answer("user"), user("user"), answer("2"), user("2"), answer("2")]
    for messages in (AGAIN, KNOWN, NAMED, short, *(one for _, one in REWRITTEN if one[1].get("tool_calls") is None)):
        made = Conversation(messages=messages, train=(None,) * len(messages), tools=None)
        made = fit_system(made, template.features, merge=True)
        assert not LOSSES & {*render_turns(template, made, "assistant").notes}


def test_prompts_of_rewards_are_compared_too(make_tokenizer, make_config, write) -> None:
    method = {"type": "grpo", "num_generations": 2, "rewards": ["exact_answer"]}
    asked = [system("Be brief."), user(LONG), answer("Yes."), user("And 3?")]
    path = write([{"messages": [*messages, answer("3")]} for messages in (asked, [user("3?")])])
    for drop in ("warn", "drop"):
        config = make_config(path, method=method, on_lost_text=drop)
        sound = prepare(config, make_tokenizer("qwen2")).report.train[0]
        assert (sound.kept, sound.dropped) == (2, {})
        report = prepare(config, make_tokenizer("qwen2", of("user", "m.content[:20]"))).report.train[0]
        found = report.dropped if drop == "drop" else report.notes
        assert (report.kept, {one: n.count for one, n in found.items()}) == (
            1 if drop == "drop" else 2,
            {LOST_TEXT["user"]: 1},
        )
