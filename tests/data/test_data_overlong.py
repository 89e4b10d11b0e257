"""What does not fit is shortened where it hurts least, and every loss is counted."""

from __future__ import annotations

import numpy as np
import pytest

from halftune.core.errors import DataError
from halftune.data.encode.tokenize import EQUAL, EQUAL_CUT
from halftune.data.encode.truncate import CUT, EARLIER, LATER, answers_in_proportion, in_proportion, keep_start
from halftune.data.formats.conversation import RowDropped
from halftune.data.pipeline import prepare
from halftune.data.store import NO_LABEL, TokenTurn, WholeSample

LONG = "what is it and why is it so " * 60
HEADER, END = "<|im_start|>assistant\n", "<|im_end|>"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def fit(tokenizer, make_config, write):
    """Prepares one conversation; returns its text, its trained text and the source's report."""

    def fit(messages, limit, **data):
        method = data.pop("method", "sft")
        prepared = prepare(
            make_config(write([{"messages": messages}]), max_length=limit, method=method, **data), tokenizer
        )
        sample = prepared.train.example(0).segments[0]
        assert len(sample.input_ids) <= limit
        report = prepared.report.train[0]
        assert report.truncated_rows == 1
        trained = tokenizer.decode(sample.input_ids[sample.labels != NO_LABEL].tolist())
        return tokenizer.decode(sample.input_ids.tolist()), trained, report

    return fit


def test_a_long_question_is_shortened_and_the_header_stays(fit):
    text, trained, report = fit([user(LONG), assistant("It is four.")], 128)
    assert trained == f"It is four.{END}"
    assert f"{END}\n{HEADER}It is four.{END}\n" in text
    assert "what is it and why" in text
    assert list(report.truncated) == ["question or tool result shortened"]
    assert report.answers_lost == 0


def test_a_long_answer_is_cut_counted_and_has_no_end(fit):
    text, trained, report = fit([user("Why?"), assistant(LONG)], 128)
    assert not trained.endswith(END)
    assert text.endswith(trained)
    assert LONG.startswith(trained)
    assert len(trained) > 100
    assert list(report.truncated) == [CUT]


def test_both_long_leave_room_for_an_answer(fit):
    text, trained, report = fit([user(LONG), assistant(LONG)], 128)
    assert text.count(HEADER) == 1
    assert LONG.startswith(trained)
    assert trained
    assert len(report.truncated) == 2


def test_a_long_first_turn_does_not_lose_the_last_answer(fit):
    messages = [user(LONG), assistant("One."), user("And?"), assistant("Two.")]
    _, trained, report = fit(messages, 128)
    assert trained == f"One.{END}Two.{END}"
    assert report.answers_lost == 0


def test_answers_that_do_not_fit_are_counted(fit):
    messages = [
        user("A?"),
        assistant("One. " * 20),
        user("B?"),
        assistant("Two. " * 20),
        user("C?"),
        assistant("Three."),
    ]
    text, trained, report = fit(messages, 128)
    assert trained == "One. " * 20 + END
    assert text.endswith(f"{END}\n")
    assert report.answers_lost == 2
    assert list(report.truncated) == [LATER]


def test_last_keeps_the_last(fit):
    messages = [
        user("A?"),
        assistant("One. " * 9),
        user("B?"),
        assistant("Two. " * 20),
        user("C?"),
        assistant("Three."),
    ]
    text, trained, report = fit(messages, 160, method={"type": "sft", "train_on": "last"})
    assert trained == f"Three.{END}"
    assert "Two." not in text
    assert f"{END}\n<|im_start|>user\nC?{END}\n{HEADER}Three.{END}" in text
    assert list(report.truncated) == [EARLIER]


def test_system_messages_are_not_shortened(fit, tokenizer, make_config, write):
    system = {"role": "system", "content": "Be kind and helpful. " * 8}
    text, trained, _ = fit([system, user(LONG), assistant("It is four.")], 256)
    assert system["content"] in text
    assert trained == f"It is four.{END}"
    with pytest.raises(DataError, match="leaves no room"):
        prepare(make_config(write([{"messages": [system, user("A?"), assistant("B.")]}]), max_length=64), tokenizer)


@pytest.mark.parametrize(("ask", "limit"), [("You are a helpful assistant. " * 5, 250), ("user " * 40, 285)])
def test_a_question_that_repeats_the_system_message_is_shortened_in_its_own_place(ask, limit, fit):
    system = {"role": "system", "content": "You are a helpful assistant. " * 5 + "user " * 40}
    text, trained, report = fit([system, user(ask), assistant("It is four. " * 15)], limit)
    assert text.startswith(f"<|im_start|>system\n{system['content']}{END}\n<|im_start|>user\n{ask[:3]}")
    assert trained.startswith("It is four.")
    assert "question or tool result shortened" in report.truncated


def test_a_question_that_repeats_the_templates_own_words(fit):
    ask = "You are a helpful assistant."
    text, _, _ = fit([user(ask), assistant(LONG)], 48)
    assert text.startswith(f"<|im_start|>system\n{ask}{END}\n<|im_start|>user\n")


@pytest.mark.parametrize("limit", [120, 121, 122, 123, 124, 125])
def test_no_character_is_cut_in_two(limit, fit):
    text, trained, _ = fit([user("好" * 200), assistant("好" * 200)], limit)
    assert "\ufffd" not in text
    assert set(trained) == {"好"}


def test_every_kept_answer_but_a_cut_one_has_its_end(tokenizer, make_config, write):
    """Random conversations at random limits: an answer is whole with its end, gone, or the last thing and cut."""
    random = np.random.default_rng(0)
    end = tokenizer.convert_tokens_to_ids(END)
    for limit in (48, 64, 100, 200):
        rows = []
        for _ in range(40):
            lengths = random.integers(1, 40, size=2 * random.integers(1, 5))
            texts = [" ".join(["word"] * int(length)) for length in lengths]
            rows.append({"messages": [(assistant if index % 2 else user)(text) for index, text in enumerate(texts)]})
        config = make_config(write(rows, f"{limit}.jsonl"), max_length=limit)
        prepared = prepare(config, tokenizer)
        report = prepared.report.train[0]
        assert report.kept + sum(count.count for count in report.dropped.values()) == len(rows)
        cut = 0
        for index in range(len(prepared.train)):
            sample = prepared.train.example(index).segments[0]
            assert len(sample.input_ids) <= limit
            labelled = sample.labels != NO_LABEL
            stops = np.flatnonzero(labelled & ~np.append(labelled[1:], False))
            for stop in stops[:-1]:
                assert sample.labels[stop] == end
            cut += sample.labels[stops[-1]] != end
        assert cut == report.truncated[CUT].count if cut else True


def test_drop_and_error(tokenizer, make_config, write):
    path = write([{"messages": [user("A?"), assistant("B.")]}, {"messages": [user(LONG), assistant("B.")]}])
    prepared = prepare(make_config(path, max_length=128, overlong="drop"), tokenizer)
    assert len(prepared.train) == 1
    assert {reason: count.rows for reason, count in prepared.report.train[0].dropped.items()} == {
        "longer than max_length 128": ["2"]
    }
    with pytest.raises(DataError, match=r"line 2: \d+ tokens .* data\.max_length \(128\)"):
        prepare(make_config(path, max_length=128, overlong="error"), tokenizer)


def test_documents_are_cut_into_pieces_and_lose_nothing(tokenizer, make_config, write):
    documents = [LONG, "short", "好" * 100]
    config = make_config(write([{"text": text} for text in documents]), method="pretrain", max_length=64)
    prepared = prepare(config, tokenizer)
    samples = [prepared.train.example(index).segments[0] for index in range(len(prepared.train))]
    ids = [token for sample in samples for token in sample.input_ids.tolist()]
    assert ids == [token for text in documents for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    for sample in samples:
        assert sample.labels[1:].tolist() == sample.input_ids[1:].tolist()
    assert prepared.train.trained.tolist() == [len(sample.input_ids) - 1 for sample in samples]


def exchanges(*lengths, trained=None):
    """A sample of exchanges with so many tokens of question and answer; token 7 is the 8th of the sample."""
    places, turns = 0, []
    for index, (question, answer) in enumerate(lengths):
        start = places + question
        places = start + answer
        wanted = trained is None or index in trained
        turns.append(TokenTurn(start, places, places, complete=True, trained=wanted))
    ids = np.arange(places, dtype=np.int32)
    labels = np.zeros(places, dtype=bool)
    for turn in turns:
        labels[turn.start : turn.end] = turn.trained
    return WholeSample(ids, [(place, place + 1) for place in ids.tolist()], labels, tuple(turns), ())


@pytest.mark.parametrize(
    ("lengths", "trained", "kept"),
    [
        # LLaMA-Factory's infer_seqlen(question, answer, 60): (40, 20), (20, 40), (30, 30)
        ([(100, 20)], None, [(0, 40), (100, 120)]),
        ([(20, 100)], None, [(0, 60)]),
        ([(100, 100)], None, [(0, 30), (100, 130)]),
        # the second exchange has the 20 tokens that the first leaves
        ([(20, 20), (50, 8)], None, [(0, 40), (40, 52), (90, 98)]),
        # only the last turn is trained: the last exchange goes first
        ([(20, 20), (20, 20)], {1}, [(0, 10), (20, 30), (40, 80)]),
        ([(40, 20), (20, 20)], None, [(0, 60)]),
    ],
)
def test_proportional_cuts_are_those_of_llamafactory(lengths, trained, kept):
    keep, done = in_proportion(exchanges(*lengths, trained=trained), 60)
    expected = np.zeros(len(keep), dtype=bool)
    for start, end in kept:
        expected[start:end] = True
    assert keep.tolist() == expected.tolist()
    assert done


@pytest.mark.parametrize(
    ("prompt", "answers", "question", "answer"),
    [  # LLaMA-Factory's infer_seqlen(prompt, longest answer, 60)
        ((100,), (20, 8), 40, 20),
        ((20,), (30, 100), 20, 40),
        ((100,), (100, 20), 30, 30),
        ((10, 10, 60), (100, 45), 27, 33),  # earlier turns are part of the prompt
    ],
)
def test_proportional_cuts_of_pairs_go_by_the_longer_answer(prompt, answers, question, answer):
    before = [(length, 0) for length in prompt[:-1]]
    samples = [exchanges(*before, (prompt[-1], one), trained={len(before)}) for one in answers]
    keep, done = answers_in_proportion(samples, 60)
    for kept, own in zip(keep, answers, strict=True):
        wanted = [index < question for index in range(sum(prompt))] + [index < answer for index in range(own)]
        assert kept.tolist() == wanted
    assert done


def test_pairs_keep_one_prompt(tokenizer, make_config, write):
    rows = [{"prompt": LONG, "chosen": "Four. " * 30, "rejected": "Five."}]
    method = {"type": "dpo", "train_line_break": True}
    config = make_config(write(rows), method=method, overlong="proportional", max_length=256)
    good, bad = prepare(config, tokenizer).train.example(0).segments
    prompts = [one.input_ids[: one.loss_mask.argmax()].tolist() for one in (good, bad)]
    assert prompts[0] == prompts[1]
    assert len(good.input_ids) == config.data.max_length
    assert len(bad.input_ids) < config.data.max_length
    assert tokenizer.decode(bad.input_ids[bad.loss_mask]) == f"Five.{END}\n"


def test_proportional_drops_a_row_without_labels_left():
    with pytest.raises(RowDropped):
        in_proportion(exchanges((40, 20), (20, 20), (20, 20), trained={1}), 60)


def test_proportional_in_a_run(fit):
    text, trained, _ = fit([user(LONG), assistant("It is four.")], 128, overlong="proportional")
    assert trained == f"It is four.{END}"
    assert HEADER not in text  # the question is cut at its end, its header included


def test_keep_start_keeps_the_first_tokens(fit):
    rows = [user("Why?"), assistant("It is four."), user("And?"), assistant(LONG)]
    text, trained, _ = fit(rows, 128, overlong="keep_start")
    assert fit(rows, 160, overlong="keep_start")[0].startswith(text)
    assert trained.startswith(f"It is four.{END}{LONG[:20]}")
    with pytest.raises(RowDropped):
        keep_start(exchanges((60, 20)), 60)  # no label is left


def test_the_line_break_after_an_answer_is_trained_on_request(tokenizer, make_config, write):
    method = {"type": "sft", "train_line_break": True}
    rows = [{"messages": [user("Why?"), assistant("It is four."), user("And?"), assistant("Four.")]}]
    sample = prepare(make_config(write(rows), method=method), tokenizer).train.example(0).segments[0]
    assert tokenizer.decode(sample.input_ids[sample.loss_mask]) == f"It is four.{END}\nFour.{END}\n"


WORDS = " ".join(f"word{number}" for number in range(120))


@pytest.mark.parametrize("method", ["dpo", "simpo", "orpo", "cpo", "reward"])
@pytest.mark.parametrize("overlong", ["truncate", "keep_start", "proportional"])
def test_pairs_that_are_equal_after_the_cut_are_dropped_and_counted(method, overlong, tokenizer, make_config, write):
    good = {"prompt": "A?", "chosen": "yes", "rejected": "no"}
    path = write([good, {"prompt": "A?", "chosen": f"{WORDS} yes", "rejected": f"{WORDS} no"}])
    prepared = prepare(make_config(path, method=method, max_length=64, overlong=overlong), tokenizer)
    assert len(prepared.train) == prepared.report.train[0].kept == 1
    assert prepared.report.train[0].dropped[EQUAL_CUT].rows == ["2"]
    assert not prepared.report.train[0].truncated
    assert len(prepare(make_config(path, method=method, max_length=2048), tokenizer).train) == 2


def test_pairs_that_the_template_makes_equal_are_dropped_and_counted(make_tokenizer, make_config, write):
    good = {"prompt": "A?", "chosen": "yes", "rejected": "no"}
    path = write([{**good, "rejected": " yes\n"}, good])
    stripped = make_tokenizer(
        template=make_tokenizer().chat_template.replace("message.content", "(message.content | trim)")
    )
    assert stripped.chat_template != make_tokenizer().chat_template
    prepared = prepare(make_config(path, method="dpo"), stripped)
    assert prepared.report.train[0].dropped[EQUAL].rows == ["1"]
    assert len(prepare(make_config(path, method="dpo"), make_tokenizer()).train) == 2
