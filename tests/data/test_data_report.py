"""The report says what keeps a dropped row, at the cause of the drop, and notes placeholders that nothing replaced."""

from __future__ import annotations

import pytest

from halftune.core.errors import DataError
from halftune.data.formats.conversation import PLACEHOLDER
from halftune.data.pipeline import prepare

TALK = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]
CALL = {"function": {"name": "weather", "arguments": {"city": "Bern"}}}
CALLING = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
REASONED = [TALK[0], {**TALK[1], "reasoning_content": "Because of this."}]


@pytest.mark.parametrize(
    ("family", "messages", "data", "remedy"),
    [
        ("llama3", CALLING, {}, "model.chat_template"),
        ("gemma", [{"role": "system", "content": "S."}, *TALK], {}, "data.merge_system"),
        ("mistral", [*TALK, *TALK[1:]], {}, "model.chat_template"),
        ("llama3", REASONED, {"on_lost_text": "drop"}, "data.on_lost_text"),
        ("qwen2", [TALK[0], {"role": "assistant", "content": "B. " * 99}], {"overlong": "drop"}, "data.max_length"),
        ("qwen2", [{"role": "user", "content": [{"type": "image"}]}, TALK[1]], {}, "data.images"),
        ("qwen2", [TALK[0], {"role": "assistant", "content": ""}], {}, "correct these rows"),
    ],
)
def test_the_remedy_of_dropped_rows_is_at_their_cause(
    family, messages, data, remedy, make_tokenizer, make_config, write, caplog
):
    rows = [{"messages": TALK}, {"messages": messages}]
    with caplog.at_level("WARNING"):
        prepared = prepare(make_config(write(rows), max_length=99, **data), make_tokenizer(family))
    ((reason, _),) = prepared.report.train[0].dropped.items()
    (line,) = [one for one in caplog.messages if reason in one]
    assert remedy in line
    assert ("correct these rows" in line) == (remedy == "correct these rows")
    with pytest.raises(DataError) as caught:
        prepare(make_config(write(rows[1:], "b.jsonl"), max_length=99, **data), make_tokenizer(family))
    assert caught.value.code == "data.nothing_left"
    assert remedy in caught.value.remedy


PLACEHOLDERS = [
    ("I am {{name}}.", "{{name}}"),
    ("By {{ the author }}!", "{{ the author }}"),
    ("{{char}}: hi", "{{char}}"),
]
BRACES = [
    *(
        "{{ user.name }}",
        "{% for a in {{b}} %}",
        r"\frac{{ab}}{{cd}}",
        "x^{{ab}}",
        'f"{{{name}}}"',
        '{"a": {"b": {}}}',
        "{name}",
    ),
    *("${{secret}}", "{{}}", "{{7}}", "{{x}}"),
]


def test_placeholders_are_noted_with_an_example(tokenizer, make_config, write):
    def notes(rows, **data):
        prepared = prepare(make_config(write(rows), **data), tokenizer)
        return prepared.report.train[0].notes, prepared

    found, prepared = notes([{"prompt": "A?", "completion": text} for text, _ in PLACEHOLDERS])
    assert [(name, count.rows) for name, count in found.items()] == [(PLACEHOLDER + "{{name}}", ["1", "2", "3"])]
    assert "{{ the author }}" in tokenizer.decode(prepared.train.example(1).segments[0].input_ids)
    for text, name in PLACEHOLDERS:
        assert list(notes([{"prompt": text, "completion": "B."}])[0]) == [PLACEHOLDER + name]
    pair = {"prompt": "A?", "chosen": "{{one}}", "rejected": "{{two}}"}
    assert [count.count for count in notes([pair], method="dpo")[0].values()] == [1]
    assert notes([{"prompt": "A?", "completion": text} for text in BRACES])[0] == {}
    assert notes([{"text": PLACEHOLDERS[0][0]}], method="pretrain")[0] == {}  # documents may be about templates
    alpaca = {"path": write([{"instruction": "A?", "output": "{{name}}"}], "c.jsonl"), "prompt": "alpaca"}
    assert list(prepare(make_config([alpaca]), tokenizer).report.train[0].notes) == [PLACEHOLDER + "{{name}}"]
