"""A tokenizer as GGUF metadata: vocabulary, merges or scores, token types, pre-tokenizer, special tokens, template."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from halftune.core.packaged import read_yaml
from halftune.export.gguf.unsupported import unsupported
from halftune.model.tokenizer.tokenizer import end_of_turn_ids

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types (``gguf.TokenType``)."""

SPACE = "▁"


@dataclass(frozen=True)
class Vocabulary:
    """What llama.cpp needs of a tokenizer.

    Attributes:
        model: ``gpt2`` (bytes, merges) or ``llama`` (SentencePiece: scores).
        pre: llama.cpp's name of what splits the text.
        tokens, types: one for each row of the embedding.
        merges: of ``gpt2``: pairs, joined by a space.
        scores: of ``llama``: the higher one is merged first.
        ids: of the special tokens, by llama.cpp's names (``bos``, ``eos``, ``eot``, ``eom``, ``unknown``, ``padding``).
        add_bos, add_eos: whether they are put around a text.
        space_prefix: of ``llama``: whether a space is put before a text.
        template: the chat template, if there is one.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    space_prefix: bool = False
    template: str | None = None

    @property
    def stops(self) -> set[int]:
        """Tokens that end an answer."""
        return {self.ids[name] for name in ("eos", "eot", "eom") if name in self.ids}


def read_vocabulary(
    tokenizer: PreTrainedTokenizerBase, rows: int | None = None, stops: Collection[int] = ()
) -> Vocabulary:
    """Describe a tokenizer for llama.cpp.

    Args:
        tokenizer: a fast tokenizer.
        rows: of the embedding; rows without a token get an unused one.
        stops: tokens that end an answer, besides the tokenizer's.

    Raises:
        ModelError: llama.cpp has no tokenizer that does the same.
    """
    where = str(tokenizer.name_or_path)
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise unsupported("the tokenizer has no tokenizer.json", where)
    raw = json.loads(backend.to_str())
    model = raw["model"]
    if model.get("type") != "BPE":
        raise unsupported(f"a tokenizer of type {model.get('type')}", where)
    for token in raw["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise unsupported(f"the token {token['content']!r} takes spaces beside it", where)
    tokens, types = _tokens(raw, rows)
    if model.get("byte_fallback"):
        kind: dict[str, Any] = {"model": "llama", "pre": "default", "scores": _scores(model, tokens, types, where)}
        kind["space_prefix"] = _space_prefix(raw, tokenizer, where)
    else:
        kind = {"model": "gpt2", "pre": pre_tokenizer(raw, where), "merges": [" ".join(one) for one in _merges(model)]}
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    around = [*tokenizer.encode("a"), None]
    first, last = around[0], around[-2]
    return Vocabulary(
        tokens=tokens,
        types=types,
        ids=_special(tokenizer, stops, where),
        add_bos=bos is not None and first == bos,
        add_eos=eos is not None and last == eos,
        template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
        **kind,
    )


def _tokens(raw: dict[str, Any], rows: int | None) -> tuple[list[str], list[int]]:
    named = {index: text for text, index in raw["model"]["vocab"].items()}
    unknown, fallback = raw["model"].get("unk_token"), raw["model"].get("byte_fallback")
    added = {one["id"]: one for one in raw["added_tokens"]}
    tokens: list[str] = []
    types: list[int] = []
    for index in range(max(rows or 0, max({*named, *added}) + 1)):
        if index in added:
            text = added[index]["content"]
            kind = UNKNOWN if text == unknown else CONTROL if added[index]["special"] else USER_DEFINED
            if kind == USER_DEFINED and fallback:
                text = text.replace(SPACE, " ")  # llama.cpp looks for it in the text as it came
        elif index in named:
            text = named[index]
            kind = BYTE if fallback and len(text) == 6 and text.startswith("<0x") else NORMAL
        else:
            text, kind = f"[PAD{index}]", UNUSED
        tokens.append(text)
        types.append(kind)
    return tokens, types


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
    return [(left, right) for left, right in pairs]


def pre_tokenizer(raw: dict[str, Any], where: str) -> str:
    """Return llama.cpp's name of the pre-tokenizer of a ``tokenizer.json``.

    Raises:
        ModelError: it has none.
    """
    normalizer = (raw.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):  # llama.cpp normalises nothing; text is nearly always NFC
        raise unsupported(f"the tokenizer's normalizer {normalizer}", where)
    steps, ignores = _steps(raw.get("pre_tokenizer")), bool(raw["model"].get("ignore_merges"))
    for row in read_yaml("halftune.export.gguf", "gguf.yaml")["pre_tokenizers"]:
        if row["steps"] == steps and row.get("ignore_merges", False) == ignores:
            return row["name"]
    raise unsupported(f"llama.cpp has no name for the tokenizer's pre-tokenizer {steps}", where)


def _steps(found: dict[str, Any] | None) -> list[str]:
    """The steps of a pre-tokenizer as in gguf.yaml; anything unknown keeps its JSON, which is in no row."""
    if found is None:
        return []
    kind = found["type"]
    if kind == "Sequence":
        return [step for one in found["pretokenizers"] for step in _steps(one)]
    if kind == "ByteLevel" and not found["add_prefix_space"]:
        return ["ByteLevel"] if found["use_regex"] else []
    if kind == "Split" and found["behavior"] == "Isolated" and not found["invert"] and "Regex" in found["pattern"]:
        return [found["pattern"]["Regex"]]
    if kind == "Digits" and found["individual_digits"]:
        return ["Digits"]
    return [json.dumps(found)]


def _scores(model: dict[str, Any], tokens: Sequence[str], types: Sequence[int], where: str) -> list[float]:
    """SentencePiece's scores of the tokens, whose order the merges have kept.

    llama.cpp merges two neighbours if their text is a token, the highest score first. That is the same as merging by
    rank only if the merges have every pair that makes a token, and all pairs of one token together.

    Raises:
        ModelError: they have not.
    """
    merges = _merges(model)
    made = [text for text, _ in groupby(left + right for left, right in merges)]
    if len(set(made)) != len(made):
        raise unsupported("the tokenizer's merges are not those of a SentencePiece model", where)
    pairs, vocabulary = set(merges), model["vocab"]
    for text in (text for text, kind in zip(tokens, types, strict=True) if kind == NORMAL):
        for cut in range(1, len(text)):
            pair = (text[:cut], text[cut:])
            if pair[0] in vocabulary and pair[1] in vocabulary and pair not in pairs:
                raise unsupported(f"the tokenizer's merges lack {pair[0]!r} + {pair[1]!r}", where)
    ranks = {text: -float(rank) for rank, text in enumerate(made)}
    return [ranks.get(text, -float(len(made))) for text in tokens]


def _space_prefix(raw: dict[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> bool:
    """Whether a space is put before every text between special tokens.

    A tokenizer that puts it before the first text only puts none into a conversation that begins with a special token.
    """
    normalizer = raw.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    kinds = [one["type"] for one in steps]
    before = raw.get("pre_tokenizer") or {}
    if before.get("type") == "Metaspace" and not kinds and not before.get("split", True):
        if before["prepend_scheme"] == "first" and not _begins_special(tokenizer):
            raise unsupported("the tokenizer puts a space before the first text only", where)
        return before["prepend_scheme"] == "always"
    splits_spaces = before.get("type") == "Split" and before["pattern"] == {"String": " "}  # of which none is left
    replaced = [one for one in steps if one["type"] == "Replace"]
    spaces = [one["pattern"] == {"String": " "} and one["content"] == SPACE for one in replaced]
    if kinds in (["Replace"], ["Prepend", "Replace"]) and all(spaces) and (not before or splits_spaces):
        return kinds[0] == "Prepend"
    raise unsupported(f"the tokenizer's normalizer {json.dumps(raw.get('normalizer'))}", where)


def _begins_special(tokenizer: PreTrainedTokenizerBase) -> bool:
    if tokenizer.chat_template is None:
        return False
    rendered = str(tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False))
    return rendered.startswith(tuple(tokenizer.all_special_tokens))


def _special(tokenizer: PreTrainedTokenizerBase, stops: Collection[int], where: str) -> dict[str, int]:
    ends = dict.fromkeys([*end_of_turn_ids(tokenizer), *sorted(stops)])
    others = [one for one in ends if one != tokenizer.eos_token_id]
    if len(others) > 2:
        raise unsupported(f"{len(ends)} tokens end an answer, and GGUF has room for three", where)
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
        **dict(zip(("eot", "eom"), others, strict=False)),
    }
    return {name: index for name, index in ids.items() if isinstance(index, int)}


def generation_of(folder: Path) -> dict[str, Any]:
    """The content of a folder's ``generation_config.json``; empty if there is none."""
    path = folder / "generation_config.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found if isinstance(found, dict) else {}


def stops_of(folder: Path) -> set[int]:
    """The tokens that end an answer by a folder's ``generation_config.json``."""
    listed = generation_of(folder).get("eos_token_id")
    return {one for one in (listed if isinstance(listed, list) else [listed]) if isinstance(one, int)}
