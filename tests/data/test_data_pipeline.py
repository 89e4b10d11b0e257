"""From a data section to samples: cache, workers, mixture, report, preview, the command."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import sys
import threading
import types

import numpy as np
import pytest
from rich.console import Console

from halftune.core.errors import DataError
from halftune.data import pipeline
from halftune.data import pipeline as cache
from halftune.data.encode import workers
from halftune.data.pipeline import prepare
from halftune.data.preview import preview
from halftune.data.store import NO_LABEL

ROWS = [{"prompt": f"What is {number}?", "completion": "four " * (number % 7 + 1)} for number in range(60)]


def everything(split):
    samples = [split.example(index).segments[0] for index in range(len(split))]
    return [(sample.input_ids.tolist(), sample.labels.tolist()) for sample in samples]


def shown(report):
    console = Console(file=io.StringIO(), width=160)
    console.print(report.render())
    return console.file.getvalue()


@pytest.fixture
def counted(monkeypatch):
    """Counts how often rows are tokenised."""
    calls = []
    original = workers.tokenize_rows

    def tokenize_rows(rows, *rest):
        calls.append(len(rows))
        return original(rows, *rest)

    monkeypatch.setattr(workers, "tokenize_rows", tokenize_rows)
    return calls


def test_lengths_and_labels_are_counted(tokenizer, make_config, write):
    split = prepare(make_config(write(ROWS)), tokenizer).train
    samples = [split.example(index).segments[0] for index in range(len(split))]
    assert split.lengths.dtype == split.trained.dtype == np.int32
    assert split.lengths.tolist() == [len(sample.input_ids) for sample in samples]
    assert split.trained.tolist() == [int((sample.labels != NO_LABEL).sum()) for sample in samples]
    assert {sample.input_ids.dtype for sample in samples} == {np.dtype(np.int32)}


def test_the_cache_is_used_and_gives_the_same(tokenizer, make_config, write, counted, own_cache):
    path = write(ROWS)
    first = prepare(make_config(path), tokenizer)
    second = prepare(make_config(path), tokenizer)
    assert counted == [60]
    assert everything(first.train) == everything(second.train)
    assert first.report.to_dict() == second.report.to_dict()
    without = prepare(make_config(path, cache=False), tokenizer)
    assert counted == [60, 60]
    assert everything(first.train) == everything(without.train)
    assert first.report.to_dict() == without.report.to_dict()
    assert not list(own_cache.rglob(".*"))


def test_large_data_give_the_same_as_small(tokenizer, make_config, write, monkeypatch):
    """Rows streamed, tokens written in parts, orders kept."""
    config = make_config({"path": write(ROWS), "samples": 50}, cache=False)
    before = prepare(config, tokenizer)
    monkeypatch.setattr("halftune.data.readers.rows.LARGE", 0)
    monkeypatch.setattr("halftune.data.order.cache.LARGE", 0)
    monkeypatch.setattr(pipeline, "WRITTEN", 7)
    cached = config.model_copy(update={"data": config.data.model_copy(update={"cache": True})})
    for run in (config, cached, cached):
        after = prepare(run, tokenizer)
        assert everything(after.train) == everything(before.train)
        assert after.report.to_dict() == before.report.to_dict()
        assert after.train.where(range(50)) == before.train.where(range(50))


def test_an_order_is_computed_once(own_cache, monkeypatch):
    from halftune.data.order.cache import ordered
    from halftune.data.order.epoch import BatchRule, epoch_rows, padded_batches

    monkeypatch.setattr("halftune.data.order.cache.LARGE", 0)
    lengths, calls = np.random.default_rng(0).integers(1, 33, size=300), []

    def rows(lengths, **arguments):
        calls.append(arguments)
        return epoch_rows(lengths, **arguments)

    packed = {"epoch": 0, "seed": 0, "packing": True, "capacity": 32}
    for _ in range(2):
        assert ordered(rows, lengths, cache=True, **packed) == epoch_rows(lengths, **packed)
    assert len(calls) == 1
    ordered(rows, lengths, cache=True, **{**packed, "epoch": 1})
    ordered(rows, lengths[::-1], cache=True, **packed)
    ordered(rows, lengths, cache=False, **packed)
    assert len(calls) == 4
    damaged = next(own_cache.rglob("samples.npy"))
    damaged.write_bytes(damaged.read_bytes()[:-8])
    for epoch in (0, 1):
        ordered(rows, lengths, cache=True, **{**packed, "epoch": epoch})
    ordered(rows, lengths[::-1], cache=True, **packed)
    assert len(calls) == 5
    rule = {"rule": BatchRule(4, grouped=True), "epoch": 0, "seed": 0}
    for _ in range(2):
        assert ordered(padded_batches, lengths, cache=True, **rule) == padded_batches(lengths, **rule)


def test_whatever_changes_the_tokens_changes_the_key(make_tokenizer, make_config, write, counted):
    path = write(ROWS)
    prepare(make_config(path), make_tokenizer())
    changes = [
        (make_config(path, max_length=64), make_tokenizer()),
        (make_config(path, system="Be brief."), make_tokenizer()),
        (make_config(path, overlong="drop"), make_tokenizer()),
        (make_config(path, method={"type": "sft", "train_on": "all"}), make_tokenizer()),
        (make_config({"path": path, "samples": 60}), make_tokenizer()),
        (make_config(path, template={"enable_thinking": False}), make_tokenizer()),
        (make_config(path), make_tokenizer("qwen3")),
        (make_config(path), make_tokenizer("llama3")),
    ]
    for number, (config, tokenizer) in enumerate(changes, start=2):
        prepare(config, tokenizer)
        assert len(counted) == number
    write([*ROWS, ROWS[0]])
    prepare(make_config(path), make_tokenizer())
    assert counted[-1] == 61


@pytest.mark.parametrize("damage", ["cut", "gone", "text", "a bit"])
def test_a_damaged_entry_is_made_anew(damage, tokenizer, make_config, write, counted, own_cache):
    config = make_config(write(ROWS))
    before = everything(prepare(config, tokenizer).train)
    (ids,) = own_cache.rglob("ids.npy")
    if damage == "cut":
        ids.write_bytes(ids.read_bytes()[:-10])
    elif damage == "gone":
        ids.unlink()
    elif damage == "a bit":  # another token, which nobody would notice
        raw = bytearray(ids.read_bytes())
        raw[-40] ^= 1
        ids.write_bytes(raw)
    else:
        (ids.parent / "report.json").write_text("{")
    assert everything(prepare(config, tokenizer).train) == before
    assert counted == [60, 60]


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(tokenizer, make_config, write, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "file"))
    assert len(prepare(make_config(write(ROWS)), tokenizer).train) == 60


def test_those_who_ask_at_once_wait_for_the_one_that_tokenises(make_tokenizer, make_config, write, counted):
    config = make_config(write(ROWS))
    threads = [threading.Thread(target=prepare, args=(config, make_tokenizer())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted == [60]


@pytest.mark.slow
def test_several_processes_give_the_same(tokenizer, make_config, write, monkeypatch):
    monkeypatch.setattr(workers, "CHUNK", 16)
    rows = [*ROWS[:40], {"prompt": "A?", "completion": ""}, *ROWS[40:]]
    one = prepare(make_config(write(rows), cache=False, num_workers=1), tokenizer)
    two = prepare(make_config(write(rows), cache=False, num_workers=2), tokenizer)
    assert everything(one.train) == everything(two.train)
    assert one.report.to_dict() == two.report.to_dict()
    assert two.report.train[0].dropped["the answer is empty"].rows == ["41"]
    path = write([*rows, {"prompt": "A?"}], "wrong.jsonl")
    with pytest.raises(DataError, match="line 62: row without an answer"):
        prepare(make_config(path, num_workers=2), tokenizer)


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_process_that_is_killed_is_a_sentence(tokenizer, make_config, write, monkeypatch):
    """As the kernel does when memory is short; multiprocessing.Pool would wait for ever."""
    monkeypatch.setattr(workers, "CHUNK", 16)
    monkeypatch.setattr(workers, "_work", killed)
    with pytest.raises(DataError, match="worker died") as caught:
        prepare(make_config(write(ROWS), cache=False, num_workers=2), tokenizer)
    assert (caught.value.where, caught.value.code == "data.worker_died") == ("data.num_workers", True)


def test_sources_are_mixed_by_weight_and_count(tokenizer, make_config, write):
    few = write([{"prompt": "B?", "completion": f"b{number}"} for number in range(10)], "few.jsonl")
    train = [{"path": write(ROWS), "samples": 20}, {"path": few, "weight": 3}]
    prepared = prepare(make_config(train), tokenizer)
    assert [source.samples for source in prepared.report.train] == [20, 10]
    assert prepared.report.train[0].rows == 60
    assert len(prepared.train) == prepared.report.train_samples == 50
    texts = [str(ids) for ids, _ in everything(prepared.train)]
    assert sorted(map(texts.count, set(texts)))[-10:] == [3] * 10


def test_held_out_samples_are_not_trained_on(tokenizer, make_config, write):
    prepared = prepare(make_config({"path": write(ROWS), "weight": 2}, eval_split=0.2), tokenizer)
    assert prepared.eval is not None
    train, held = everything(prepared.train), everything(prepared.eval)
    assert (len(train), len(held)) == (96, 12)
    assert not [sample for sample in held if sample in train]
    own = prepare(make_config(write(ROWS), eval=write(ROWS[:5], "eval.jsonl")), tokenizer)
    assert own.eval is not None
    assert (len(own.train), len(own.eval), len(own.report.eval)) == (60, 5, 1)
    assert prepare(make_config(write(ROWS)), tokenizer).eval is None


def test_a_source_that_is_listed_twice_shows_training_nothing_of_the_evaluation(tokenizer, make_config, write):
    first, copy = write(ROWS, "a.jsonl"), write([*ROWS[::-1], ROWS[0]], "b.jsonl")
    prepared = prepare(make_config([first, first, copy], eval_split=0.2), tokenizer)
    assert prepared.eval is not None
    train, held = everything(prepared.train), everything(prepared.eval)
    assert len(held) == 12
    assert not [sample for sample in held if sample in train]
    assert len(train) in (181 - 3 * 12, 181 - 3 * 12 - 1)  # ROWS[0] is there four times


def test_the_report_adds_up(tokenizer, make_config, write):
    rows = [*ROWS, {"prompt": "A?", "completion": ""}, {"prompt": "B?", "completion": "four " * 300, "note": 1}]
    prepared = prepare(make_config(write(rows), max_length=128, system="Be kind."), tokenizer)
    report = prepared.report.to_dict()
    (source,) = report["train"]
    assert (source["rows"], source["kept"], source["samples"]) == (62, 61, 61)
    assert source["dropped"] == {"the answer is empty": {"count": 1, "rows": ["61"]}}
    assert [count["rows"] for count in source["truncated"].values()] == [["62"]]
    assert source["unused"] == ["note"]
    assert source["tokens"] == int(prepared.train.lengths.sum())
    assert source["trained_tokens"] == int(prepared.train.trained.sum())
    assert sum(count for _, count in source["lengths"]) == 61
    assert source["lengths"][-1][0] == prepared.train.lengths.max() == 128
    fed = report["efficiency"]
    assert fed["packed"] == pytest.approx(source["tokens"] / (128 * fed["packed_rows"]))
    assert 0 < fed["padded"] <= 1
    assert json.loads(json.dumps(report)) == json.loads(json.dumps(report, default=str))
    text = shown(prepared.report)
    for part in ("prompt_completion", "dropped: the answer is empty: 1 (row 61)", "columns not used: note", "█"):
        assert part in text


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [None, 2100])
def test_padding_efficiency_is_that_of_the_batches_that_are_fed(tokenizer, make_config, write, tokens):
    from halftune.data.batch import collate
    from halftune.data.order.epoch import BatchRule, padded_batches

    config = make_config(write(ROWS), batch=7)
    size = {"per_device_train_batch_size": None if tokens else 7, "tokens_per_batch": tokens}
    config = config.model_copy(update={"training": config.training.model_copy(update=size)})
    prepared = prepare(config, tokenizer)
    split = prepared.train
    fed = 0
    rule = BatchRule(7, tokens, 1, True)
    for batch in padded_batches(split.lengths, rule, epoch=0, seed=config.training.seed):
        rows = 7 if tokens is None else rule.rows_of(tokens, batch[0][0].stop)
        for start in range(0, len(batch), rows):
            part = [split.part(span) for row in batch[start : start + rows] for span in row]
            shape = collate(part, 0, packed=False).tokens["input_ids"].shape
            assert shape[0] <= 7 if tokens is None else shape.numel() <= tokens
            fed += shape.numel()
    assert prepared.report.efficiency.padded == pytest.approx(split.lengths.sum() / fed)


def test_text_for_sft_says_what_to_set(tokenizer, make_config, write):
    with pytest.raises(DataError, match=r"no answers to train on · set method: \{type: pretrain\}"):
        prepare(make_config(write([{"text": "a"}])), tokenizer)


def test_preview_shows_what_is_trained_with_and_without_colour(tokenizer, make_config, write):
    row = {"prompt": "好?", "completion": "你好，世界。"}
    sample = prepare(make_config(write([row])), tokenizer).train.example(0)
    text = preview(sample, tokenizer)
    assert text.plain.endswith("<|im_start|>user\n好?<|im_end|>\n<|im_start|>assistant\n⟦你好，世界。<|im_end|>⟧\n")
    green = [text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style)]
    assert "你好，世界。" in green
    assert "<|im_end|>" in green
    assert "好?" not in green


@pytest.fixture
def command(monkeypatch, tokenizer, make_config, write):
    """Runs ``halftune data`` on a small set, with the neighbours it needs put in its place."""
    import halftune.cli.verbs.data as module

    config = make_config(write(ROWS))
    monkeypatch.setattr(module, "load_from", lambda args: types.SimpleNamespace(run=config))
    monkeypatch.setattr(module, "tokenizer_section", lambda loaded: config.model)
    monkeypatch.setattr(module, "check_folders", lambda model, weights: None)
    fake = types.ModuleType("halftune.model.tokenizer.tokenizer")
    fake.load_tokenizer = lambda model: tokenizer
    monkeypatch.setitem(sys.modules, "halftune.model.tokenizer.tokenizer", fake)

    def command(*arguments):
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        return module.run(parser.parse_args(["--config", "unused.yaml", *arguments]))

    return command


def test_the_command_prints_report_and_samples(command, capsys):
    assert command("--samples", "2") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out  # no colour in a pipe
    assert out.count("⟦four") == 2
    assert "sample 2" in out
    assert "sample 3" not in out
    assert "60" in out


def test_the_command_prints_json(command, capsys):
    assert command("--json") == 0
    assert json.loads(capsys.readouterr().out)["train"][0]["kept"] == 60


def test_the_command_works_before_the_recipe_it_depends_on_has_run(tmp_path, monkeypatch):
    from halftune.cli.verbs.data import tokenizer_section
    from halftune.config.load import load_config

    monkeypatch.chdir(tmp_path)
    rest = "data: {train: builtin:python-docs}\n"
    (tmp_path / "first.yaml").write_text(
        f"model: {{name_or_path: builtin:qwen2-tiny}}\ntraining: {{output_dir: runs/first}}\n{rest}"
    )
    (tmp_path / "second.yaml").write_text(
        "depends_on: [first.yaml]\nmodel: {name_or_path: runs/first/final}\n"
        f"training: {{output_dir: runs/second}}\n{rest}"
    )
    section = tokenizer_section(load_config(tmp_path / "second.yaml"))
    assert (section.name_or_path, section.tokenizer) == ("runs/first/final", "builtin:qwen2-tiny")
    (tmp_path / "runs/first/final").mkdir(parents=True)
    assert tokenizer_section(load_config(tmp_path / "second.yaml")).tokenizer is None


def test_tokens_of_one_method_are_not_those_of_another(tokenizer, make_config, write):
    rows = write(ROWS)
    assert prepare(make_config(rows), tokenizer).train
    with pytest.raises(DataError) as refused:
        prepare(make_config(rows, method="dpo"), tokenizer)
    assert refused.value.code == "data.preference_pairs"


def test_tokens_are_made_anew_when_the_code_that_makes_them_changes(tokenizer, tmp_path, monkeypatch):
    def key():
        cache.code_of.cache_clear()
        return cache.cache_key(tokenizer, {})

    room = tmp_path / "data"
    shutil.copytree(cache.PACKAGE, room, ignore=shutil.ignore_patterns("__pycache__"))
    before = key()
    monkeypatch.setattr(cache, "PACKAGE", room)
    assert key() == before
    (room / "__pycache__").mkdir()
    (room / "__pycache__/report.pyc").write_bytes(b"1")
    assert key() == before
    for name in ("report.py", "formats/turns.py"):
        text = (room / name).read_text()
        (room / name).write_text(text + "# changed\n")
        assert key() != before
        (room / name).write_text(text)
    assert key() == before
    (room / "report.py").rename(room / "reports.py")
    assert key() != before


def test_large_sources_take_the_cores_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(workers, "cpu_cores", lambda: 3)
    assert workers._count("auto", workers.LARGE + 1) == 3
    assert workers._count("auto", workers.LARGE) == 1
    assert workers._count(2, 10) == 2


def test_pieces_for_a_program_are_the_sample_and_its_labels(tokenizer, make_config, write):
    from halftune.data.preview import as_data

    config = make_config(write([{"prompt": "好?", "completion": "你好，世界。"}]))
    example = prepare(config, tokenizer).train.example(0)
    shown, sample = as_data(example, tokenizer), example.segments[0]
    assert (shown["tokens"], shown["trained"]) == (len(sample.input_ids), int((sample.labels != -100).sum()))
    (pieces,) = shown["segments"]
    assert "".join(piece["text"] for piece in pieces) == tokenizer.decode(sample.input_ids)
    assert [piece["text"] for piece in pieces if piece["trained"]] == ["你好，世界。", "<|im_end|>"]
    control = [piece["text"] for piece in pieces if piece["control"]]
    assert control == ["<|im_start|>", "<|im_end|>"] * 3  # of a system prompt by the template, too


def test_samples_are_drawn_at_random_and_found_by_their_text(tokenizer, make_config, write):
    from halftune.data.preview import pick

    rows = [{"prompt": f"Number {n}?", "completion": f"It is {n}."} for n in range(30)]
    split = prepare(make_config(write(rows)), tokenizer).train
    assert pick(split, tokenizer, 3) == [0, 1, 2]
    drawn = pick(split, tokenizer, 3, seed=1)
    assert drawn == pick(split, tokenizer, 3, seed=1)
    assert drawn != pick(split, tokenizer, 3, seed=2)
    found = pick(split, tokenizer, 9, seed=1, text="NUMBER 17")
    assert [split.where([number]).rpartition(" ")[2] for number in found] == ["18"]
    assert pick(split, tokenizer, 9, text="nowhere") == []


def test_rows_that_the_report_lists_are_shown_as_they_stand(tokenizer, make_config, write):
    from halftune.data.preview import listed_rows

    rows = [{"prompt": "Number?", "completion": "One."}, {"prompt": "Empty?", "completion": ""}]
    config = make_config(write(rows))
    report = prepare(config, tokenizer).report.train[0]
    listed = listed_rows(config.data.train[0], report)
    assert {place: json.loads(row) for place, row in listed.items()} == {"2": rows[1]}
