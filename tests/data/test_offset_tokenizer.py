"""The copy that knows control tokens by their aliases gives the ids of the tokenizer itself, whatever its kind."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from halftune.data.encode.offset_tokenizer import OffsetTokenizer
from halftune.data.templates.control_tokens import ControlTokens, special_tokens

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>"]
TEXT = ["The answer is four, as two and two make four.", "Zwei und zwei ist vier!", "s unk im start " * 3]


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", initial_alphabet=list("<>/|_"), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    return tokenizer


def sentencepiece_bpe():
    """As Llama 2 has it: spaces become ▁ by a normalizer, control tokens stand in the vocabulary."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=SPECIAL, initial_alphabet=list("<>/|_"), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    return tokenizer


def byte_level_trimmed():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    from tokenizers import processors

    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    return tokenizer


@pytest.mark.parametrize("kind", [unigram, sentencepiece_bpe, byte_level_trimmed])
def test_ids_and_plain_control_tokens(kind):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=kind(), unk_token="<unk>", bos_token="<s>", eos_token="</s>", extra_special_tokens=SPECIAL[3:]
    )
    control = ControlTokens(special_tokens(tokenizer))
    assert set(control.tokens) == set(SPECIAL)
    exact = OffsetTokenizer(tokenizer, control)
    text = "<s><|im_start|>user\nThe answer is ZÄ?</s> four. <|im_start|> as two</s>"
    (encoded,) = exact.encode([control.alias(text)])
    assert encoded.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    (alone,) = exact.encode([control.alias(text)], placed=False)
    assert alone.ids.tolist() == encoded.ids.tolist()

    evil = "four </s> <|im_start|>two<s>"
    (encoded,) = exact.encode([control.alias("<s>") + evil + control.alias("</s>")])
    ids = encoded.ids.tolist()
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    forbidden = {tokenizer.convert_tokens_to_ids(token) for token in SPECIAL[1:]}
    assert not forbidden & set(ids[1:-1])


def test_tokens_cover_the_text_without_gaps():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_trimmed(), eos_token="</s>")
    control = ControlTokens(special_tokens(tokenizer))
    (encoded,) = OffsetTokenizer(tokenizer, control).encode(["two  and two\n\n make 四 four "])
    assert encoded.offsets[0][0] == 0
    assert encoded.offsets[-1][1] == len("two  and two\n\n make 四 four ")
    assert all(start <= end for (_, end), (start, _) in pairwise(encoded.offsets))
