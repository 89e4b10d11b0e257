"""Text that a tokenizer has no token for is counted, and refused where it is more than a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from halftune.config.load import load_config
from halftune.core.errors import DataError
from halftune.data.encode.offset_tokenizer import OffsetTokenizer
from halftune.data.pipeline import prepare
from halftune.data.templates.control_tokens import ControlTokens

LETTERS = {letter: index for index, letter in enumerate("abdeinst ▁")}
BYTES = {f"<0x{byte:02X}>": len(LETTERS) + byte for byte in range(256)}
UNKNOWN = {"<unk>": len(LETTERS)}


def tokenizer(model: models.Model, normalizer=None, splitter=None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    backend.normalizer, backend.decoder = normalizer, decoders.Fuse()
    backend.pre_tokenizer = splitter
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>")


def lost(text: str, *args, **kwargs) -> str:
    (encoded,) = OffsetTokenizer(tokenizer(*args, **kwargs), ControlTokens([])).encode([text])
    return encoded.lost


def bpe(**kwargs) -> models.BPE:
    return models.BPE(kwargs.pop("vocab", LETTERS), [], **kwargs)


def test_characters_without_a_token() -> None:
    assert lost("It is 1, dear b.", bpe(), splitter=pre_tokenizers.Metaspace()) == "I1,r."


def test_characters_with_the_unknown_token() -> None:
    known = models.WordLevel({"it": 0, "is": 1, "[UNK]": 2}, unk_token="[UNK]")
    assert lost("it is so", known, splitter=pre_tokenizers.Whitespace()) == "so"
    assert lost("in Bad", bpe(vocab=LETTERS | UNKNOWN, unk_token="<unk>")) == "B"
    unigram = models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("in", -1.0)], unk_id=0)
    assert lost("in ß in", unigram, splitter=pre_tokenizers.Metaspace()) == "ß"


def test_what_is_removed_on_purpose_is_not_lost() -> None:
    quiet = normalizers.Sequence([normalizers.BertNormalizer(), normalizers.Replace("1", "")])
    assert lost("D\u0300a\x00 1 d", bpe(), normalizer=quiet, splitter=pre_tokenizers.BertPreTokenizer()) == ""


@pytest.mark.parametrize("splitter", [pre_tokenizers.Metaspace(), pre_tokenizers.Whitespace()])
def test_accents_that_the_normalizer_composes_are_not_lost(splitter: pre_tokenizers.PreTokenizer) -> None:
    model = bpe(vocab=LETTERS | {"à": 90, "한": 91})
    for normalizer in (normalizers.NFC(), normalizers.NFKC()):
        assert lost("ba\u0300d a\u0300 \u1112\u1161\u11ab", model, normalizer, splitter) == ""
        assert lost("a\u0300b! a\u0300q", model, normalizer, splitter) == "!q"


def test_bytes_lose_nothing() -> None:
    assert lost("Bär 日本", bpe(vocab=LETTERS | BYTES, byte_fallback=True)) == ""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    assert lost("Bär 日本", bpe(vocab=letters), splitter=pre_tokenizers.ByteLevel(add_prefix_space=False)) == ""
    letters.pop("Ã")
    assert len(lost("Bär", bpe(vocab=letters), splitter=pre_tokenizers.ByteLevel(add_prefix_space=False))) == 1


@pytest.mark.parametrize(("text", "found"), [("abba " * 30, 0), ("abba " * 30 + "!", 2), ("abba !!", -1)])
def test_a_trace_is_reported_and_more_is_refused(tmp_path: Path, text: str, found: int) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(2)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {name_or_path: builtin:qwen2-tiny}\nmethod: {type: pretrain}\n"
        f"data: {{train: {tmp_path}/rows.jsonl, cache: false}}\ntraining: {{output_dir: {tmp_path}/run}}\n"
    )
    config = load_config(recipe).run
    mine = tokenizer(bpe(vocab=LETTERS | {"</s>": 99}), splitter=pre_tokenizers.Metaspace())
    if found < 0:
        with pytest.raises(DataError) as caught:
            prepare(config, mine)
        assert caught.value.code == "data.text_lost"
    else:
        (report,) = prepare(config, mine).report.train
        assert (report.lost_characters, report.lost) == (found, "!" if found else "")
