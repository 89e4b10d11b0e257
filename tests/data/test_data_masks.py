"""What is fed is the chat template's rendering, and what is trained is what the assistant writes, with its end."""

from __future__ import annotations

import pytest

from halftune.core.errors import DataError
from halftune.data.encode.tokenize import MERGED
from halftune.data.pipeline import prepare
from halftune.data.store import NO_LABEL

ONE = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "The answer is four."}]
TWO = [*ONE, {"role": "user", "content": "And in German?"}, {"role": "assistant", "content": "Zwei und zwei ist vier!"}]
FAMILIES = ("qwen2", "qwen3", "llama3", "mistral", "gemma", "generation")
END = {"llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>"}


def only(prepared):
    assert len(prepared.train) == 1, prepared.report.to_dict()
    return prepared.train.example(0).segments[0]


def trained_texts(sample, tokenizer):
    """Runs of neighbouring labelled tokens, decoded."""
    texts, run = [], []
    for token, label in zip(sample.input_ids.tolist(), sample.labels.tolist(), strict=True):
        assert label in (token, NO_LABEL)
        if label == NO_LABEL:
            texts, run = ([*texts, tokenizer.decode(run)], []) if run else (texts, run)
        else:
            run.append(token)
    return [*texts, tokenizer.decode(run)] if run else texts


def rendered(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_answer(family, make_tokenizer, make_config, write):
    tokenizer = make_tokenizer(family)
    sample = only(prepare(make_config(write([{"messages": ONE}])), tokenizer))
    prompt = rendered(tokenizer, ONE[:-1], add_generation_prompt=True)
    assert sample.input_ids.tolist() == rendered(tokenizer, ONE)
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert (sample.labels[: len(prompt)] == NO_LABEL).all()
    assert sample.labels[len(prompt)] == sample.input_ids[len(prompt)]
    (text,) = trained_texts(sample, tokenizer)
    think = "<think>\n\n</think>\n\n" if family == "qwen3" else ""
    space = " " if family == "mistral" else ""
    assert text == f"{space}{think}The answer is four.{END.get(family, '<|im_end|>')}"


@pytest.mark.parametrize("family", FAMILIES)
def test_several_answers(family, make_tokenizer, make_config, write):
    tokenizer = make_tokenizer(family)
    sample = only(prepare(make_config(write([{"messages": TWO}])), tokenizer))
    end, space = END.get(family, "<|im_end|>"), " " if family == "mistral" else ""
    think = "<think>\n\n</think>\n\n" if family == "qwen3" else ""
    assert sample.input_ids.tolist() == rendered(tokenizer, TWO)
    assert trained_texts(sample, tokenizer) == [
        f"{space}The answer is four.{end}",
        f"{space}{think}Zwei und zwei ist vier!{end}",
    ]


def test_train_on_last_and_all(tokenizer, make_config, write):
    path = write([{"messages": TWO}])
    last = only(prepare(make_config(path, method={"type": "sft", "train_on": "last"}), tokenizer))
    assert trained_texts(last, tokenizer) == ["Zwei und zwei ist vier!<|im_end|>"]
    whole = only(prepare(make_config(path, method={"type": "sft", "train_on": "all"}), tokenizer))
    assert whole.labels[1:].tolist() == whole.input_ids[1:].tolist()
    assert whole.labels[0] == NO_LABEL  # it is predicted from nothing


@pytest.mark.parametrize("mark", [{"train": False}, {"weight": 0}, {"weight": 0.0}])
def test_a_turn_can_be_left_untrained(mark, tokenizer, make_config, write):
    messages = [TWO[0], {**TWO[1], **mark}, *TWO[2:]]
    sample = only(prepare(make_config(write([{"messages": messages}])), tokenizer))
    assert sample.input_ids.tolist() == rendered(tokenizer, TWO)
    assert trained_texts(sample, tokenizer) == ["Zwei und zwei ist vier!<|im_end|>"]


@pytest.mark.parametrize("mark", [{"train": "false"}, {"train": "no"}, {"train": 0}, {"weight": "0"}, {"weight": 0.5}])
def test_a_mark_that_is_no_boolean_is_an_error(mark, tokenizer, make_config, write):
    path = write([{"messages": ONE}, {"messages": [ONE[0], {**ONE[1], **mark}]}])
    with pytest.raises(DataError, match=rf"{path} line 2: message 2: (train|weight): expected"):
        prepare(make_config(path), tokenizer)


def test_system_messages_are_never_touched(tokenizer, make_config, write):
    own = [{"role": "system", "content": "Speak like a pirate."}, *ONE]
    config = make_config(write([{"messages": own}, {"messages": ONE}]), system="Be brief.")
    prepared = prepare(config, tokenizer)
    assert prepared.train.example(0).segments[0].input_ids.tolist() == rendered(tokenizer, own)
    brief = [{"role": "system", "content": "Be brief."}, *ONE]
    assert prepared.train.example(1).segments[0].input_ids.tolist() == rendered(tokenizer, brief)
    # The next use in the same process knows nothing of it.
    without = only(prepare(make_config(write([{"messages": ONE}], "other.jsonl")), tokenizer))
    assert without.input_ids.tolist() == rendered(tokenizer, ONE)


def test_reasoning_is_trained_where_the_template_keeps_it(make_tokenizer, make_config, write):
    tokenizer = make_tokenizer("qwen3")
    first = {**TWO[1], "reasoning_content": "two and two"}
    last = {**TWO[3], "reasoning_content": "make four"}
    prepared = prepare(make_config(write([{"messages": [TWO[0], first, TWO[2], last]}])), tokenizer)
    sample = only(prepared)
    assert sample.input_ids.tolist() == rendered(tokenizer, [TWO[0], first, TWO[2], last])
    assert trained_texts(sample, tokenizer) == [
        "The answer is four.<|im_end|>",
        "<think>\nmake four\n</think>\n\nZwei und zwei ist vier!<|im_end|>",
    ]
    assert [note for note in prepared.report.train[0].notes if "rewrites earlier turns" in note]


def test_thinking_switched_off_puts_the_empty_block_into_the_prompt(make_tokenizer, make_config, write):
    tokenizer = make_tokenizer("qwen3")
    config = make_config(write([{"messages": ONE}]), template={"enable_thinking": False})
    sample = only(prepare(config, tokenizer))
    prompt = rendered(tokenizer, ONE[:-1], add_generation_prompt=True, enable_thinking=False)
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert trained_texts(sample, tokenizer) == ["The answer is four.<|im_end|>"]


def test_a_prompt_that_opens_the_thought_block(make_tokenizer, make_config, write, templates):
    """The prompt of an earlier turn is no prefix of the conversation; its header still is."""
    tokenizer = make_tokenizer("qwen3", templates.ALWAYS_THINKING)
    sample = only(prepare(make_config(write([{"messages": TWO}])), tokenizer))
    assert sample.input_ids.tolist() == rendered(tokenizer, TWO)
    assert trained_texts(sample, tokenizer) == [
        "The answer is four.<|im_end|>",
        "\n</think>\n\nZwei und zwei ist vier!<|im_end|>",
    ]


def test_generation_blocks_agree_with_transformers_and_the_end_is_trained(
    make_tokenizer, make_config, write, templates
):
    path = write([{"messages": TWO}])
    tokenizer = make_tokenizer("generation")
    sample = only(prepare(make_config(path), tokenizer))
    theirs = tokenizer.apply_chat_template(TWO, return_dict=True, return_assistant_tokens_mask=True)
    assert (sample.labels != NO_LABEL).astype(int).tolist() == theirs["assistant_masks"]
    forgotten = make_tokenizer("generation", templates.GENERATION_WITHOUT_END)
    assert (only(prepare(make_config(path), forgotten)).labels == sample.labels).all()


def test_a_template_without_ends_is_named(make_tokenizer, make_config, write, templates):
    tokenizer = make_tokenizer("plain", templates.PLAIN)
    prepared = prepare(make_config(write([{"messages": TWO}])), tokenizer)
    sample = only(prepared)
    assert sample.input_ids.tolist() == rendered(tokenizer, TWO)
    # The space of the header and the first word are one token: it carries the answer's first word, so it is trained.
    assert trained_texts(sample, tokenizer) == [" The answer is four.\n", " Zwei und zwei ist vier!\n"]
    notes = " ".join(prepared.report.train[0].notes)
    assert "no end-of-turn token" in notes
    assert MERGED in notes


REPEATED = [TWO[0], TWO[1], {"role": "user", "content": "four"}, {"role": "assistant", "content": "And four is vier."}]


@pytest.mark.parametrize("name", ["END_AT_LAST", "LAST_ENDS"])
@pytest.mark.parametrize("messages", [TWO, REPEATED])
def test_an_end_token_behind_the_last_answer_only(name, messages, make_tokenizer, make_config, write, templates):
    """Neither the next question nor its header is trained, and the report says that an end is missing."""
    tokenizer = make_tokenizer("plain", getattr(templates, name))
    prepared = prepare(make_config(write([{"messages": messages}])), tokenizer)
    sample = only(prepared)
    assert sample.input_ids.tolist() == rendered(tokenizer, messages)
    end = "\n<|im_end|>" if name == "END_AT_LAST" else "<|im_end|>"
    texts = [text.strip(" ") for text in trained_texts(sample, tokenizer)]
    assert texts == [messages[1]["content"], messages[3]["content"] + end]
    assert [note for note in prepared.report.train[0].notes if "no end-of-turn token" in note]


def test_a_prompt_that_is_written_differently_later(make_tokenizer, make_config, write, templates):
    tokenizer = make_tokenizer("plain", templates.LAST_OF_ALL_ENDS)
    sample = only(prepare(make_config(write([{"messages": TWO}])), tokenizer))
    assert sample.input_ids.tolist() == rendered(tokenizer, TWO)
    texts = [text.strip() for text in trained_texts(sample, tokenizer)]
    assert texts == [TWO[1]["content"], f"{TWO[3]['content']}<|im_end|>"]


def test_where_no_mask_can_be_found_the_row_is_dropped(make_tokenizer, make_config, write, templates):
    tokenizer = make_tokenizer("plain", templates.SHUFFLED)
    with pytest.raises(DataError, match=r"loss mask.*: 2 \(rows 1, 2\)"):
        prepare(make_config(write([{"messages": ONE}, {"messages": TWO}])), tokenizer)


def test_an_end_of_the_text_behind_the_end_of_the_last_turn(make_tokenizer, make_config, write, templates):
    """Not trained: the model has stopped by then, and the line break before it is not for it to write."""
    tokenizer = make_tokenizer("llama3", templates.END_OF_TEXT)
    sample = only(prepare(make_config(write([{"messages": TWO}])), tokenizer))
    assert tokenizer.decode(sample.input_ids.tolist()).endswith("<|eot_id|>\n</s>")
    assert trained_texts(sample, tokenizer) == [TWO[1]["content"] + "<|eot_id|>", TWO[3]["content"] + "<|eot_id|>"]


def test_another_end_token_behind_earlier_answers(make_tokenizer, make_config, write, templates):
    tokenizer = make_tokenizer("plain", templates.TWO_ENDS)
    prepared = prepare(make_config(write([{"messages": TWO}])), tokenizer)
    texts = [text.strip() for text in trained_texts(only(prepared), tokenizer)]
    assert texts == [f"{TWO[1]['content']}<|im_end|>", f"{TWO[3]['content']}<|endoftext|>"]
    assert not [note for note in prepared.report.train[0].notes if "no end-of-turn token" in note]


def test_marks_on_questions(tokenizer, make_config, write):
    def row(**mark):
        return write([{"messages": [{**ONE[0], **mark}, ONE[1]]}])

    everything = {"type": "sft", "train_on": "all"}
    for mark in ({"weight": 1}, {"train": True}):
        with pytest.raises(DataError, match=r"line 1: .*user message.*train_on: all"):
            prepare(make_config(row(**mark)), tokenizer)
        sample = only(prepare(make_config(row(**mark), method=everything), tokenizer))
        assert sample.labels[1:].tolist() == sample.input_ids[1:].tolist()
    sample = only(prepare(make_config(row(weight=0), method=everything), tokenizer))
    before, after = trained_texts(sample, tokenizer)
    assert before.endswith("<|im_start|>user\n")
    assert after == "<|im_end|>\n<|im_start|>assistant\nThe answer is four.<|im_end|>\n"
    sample = only(prepare(make_config(row(weight=0)), tokenizer))
    assert trained_texts(sample, tokenizer) == ["The answer is four.<|im_end|>"]


ODD = {
    "two questions": [ONE[0], *ONE],
    "assistant first": [{"role": "assistant", "content": "Hello!"}, *ONE],
    "two answers": [*ONE, {"role": "assistant", "content": "Or vier."}],
    "question last": [*ONE, {"role": "user", "content": "And?"}],
}
ODD_ANSWERS = {
    "assistant first": ["Hello!<|im_end|>", "The answer is four.<|im_end|>"],
    "two answers": ["The answer is four.<|im_end|>", "Or vier.<|im_end|>"],
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_odd_turns_are_trained_as_rendered(family, name, make_tokenizer, make_config, write):
    tokenizer = make_tokenizer(family)
    sample = only(prepare(make_config(write([{"messages": ODD[name]}])), tokenizer))
    assert sample.input_ids.tolist() == rendered(tokenizer, ODD[name])
    texts = [text.replace("<think>\n\n</think>\n\n", "") for text in trained_texts(sample, tokenizer)]
    assert texts == ODD_ANSWERS.get(name, ["The answer is four.<|im_end|>"])


def test_turns_that_a_template_refuses_are_dropped_and_counted(make_tokenizer, make_config, write):
    rows = [{"messages": ONE}, {"messages": ODD["two questions"]}, {"messages": ODD["assistant first"]}]
    prepared = prepare(make_config(write(rows)), make_tokenizer("mistral"))
    ((reason, count),) = prepared.report.train[0].dropped.items()
    assert "roles must alternate" in reason
    assert (count.count, count.rows) == (2, ["2", "3"])
    assert len(prepared.train) == 1


def test_empty_answers_are_not_trained(tokenizer, make_config, write):
    empty = [TWO[0], {"role": "assistant", "content": " "}, *TWO[2:]]
    sample = only(prepare(make_config(write([{"messages": empty}])), tokenizer))
    assert trained_texts(sample, tokenizer) == ["Zwei und zwei ist vier!<|im_end|>"]


def test_no_chat_template_says_what_to_do(make_tokenizer, make_config, write):
    with pytest.raises(DataError) as failure:
        prepare(make_config(write([{"messages": ONE}])), make_tokenizer("none"))
    assert failure.value.code == "model.chat_template_missing"


def test_the_tokenizer_is_left_as_it_was(tokenizer, make_config, write):
    before, template = tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template
    prepare(make_config(write([{"messages": TWO}])), tokenizer)
    assert tokenizer.backend_tokenizer.to_str() == before
    assert tokenizer.chat_template == template


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_conversation_is_rendered_in_few_calls(family, make_tokenizer, make_config, write, monkeypatch):
    """Each answer is compared with renderings of its own; made one by one, they cost twice as much."""

    def calls(turns):
        tokenizer, made = make_tokenizer(family), []
        apply = type(tokenizer).apply_chat_template
        monkeypatch.setattr(
            tokenizer, "apply_chat_template", lambda *a, **k: made.append(a) or apply(tokenizer, *a, **k), raising=False
        )
        only(prepare(make_config(write([{"messages": ONE * turns}]), max_length=4096), tokenizer))
        return len(made)

    assert calls(12) == calls(4)


@pytest.mark.parametrize("tags", [("<think>", "</think>"), ("<think>\n", "\n</think>\n\n")])
@pytest.mark.parametrize("last", [False, True])
def test_an_answer_of_one_word_beside_a_tag_is_trained(tags, last, make_tokenizer, make_config, write):
    tokenizer = make_tokenizer("qwen3")
    messages = [ONE[0], {"role": "assistant", "content": f"{tags[0]}Add them.{tags[1]}4"}, *([] if last else TWO[2:])]
    texts = trained_texts(only(prepare(make_config(write([{"messages": messages}])), tokenizer)), tokenizer)
    assert texts[0] == ("<think>\nAdd them.\n</think>\n\n" if last else "") + "4<|im_end|>"
    assert len(texts) == (1 if last else 2)
