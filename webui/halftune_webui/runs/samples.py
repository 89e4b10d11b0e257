"""A data report as HTML: what became of every row, and samples with their trained tokens coloured."""

from __future__ import annotations

import re
import unicodedata
from html import escape
from typing import Any

from halftune_webui.labels import Words

_ROWS = 8  # rows that are listed
# Control characters, and those that change the direction of what follows or cannot be seen; joiners, which scripts and
# emoji need, are left.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)


def visible(text: str) -> str:
    """Escaped text in which characters that nobody sees, or that mirror others, stand by their number."""

    def shown(found: re.Match[str]) -> str:
        code = f"U+{ord(found[0]):04X}"
        return f'<span class="unseen" title="{unicodedata.name(found[0], code)}">{code}</span>'

    return _INVISIBLE.sub(shown, escape(text))


def data_view(report: dict[str, Any], words: Words, start: int = 0, size: int = 5, key: str = "", of: str = "") -> str:
    """The answer of ``halftune data --json``.

    Args:
        report: the answer.
        words: the labels.
        start, size: which of its samples are shown.
        key: names the report in the page's address, and for the buttons that turn its pages.
        of: the recipe's text; where the page's is another one, the report is marked as out of date.
    """
    sources = [*report["train"], *report["eval"]]
    fed = report["efficiency"]
    summary = words(
        "data.summary",
        train=f"{report['train_samples']:,}",
        eval=f"{report['eval_samples']:,}",
        padded=f"{fed['padded']:.0%}",
        packed=f"{fed['packed']:.0%}",
        rows=f"{fed['packed_rows']:,}",
    )
    parts = [_table(sources, words), f'<p class="help">{escape(summary)}</p>']
    parts += [_source(source, rows, words) for source, rows in zip(sources, report["rows"], strict=True)]
    legend = (
        f'<p class="legend"><span class="t">{escape(words("data.trained_text"))}</span>'
        f'<span>{escape(words("data.read_text"))}</span><span class="c">{escape(words("data.control"))}</span></p>'
    )
    found = report["samples"]
    pages = _pages(start, size, len(found), report["train_samples"], key, words)
    samples = [_sample(start + number, one, words) for number, one in enumerate(found[start : start + size], 1)]
    parts += [pages, legend, *samples] if found else [f'<p class="empty">{escape(words("data.nothing_found"))}</p>']
    stale = f'<p class="alarm stale">{escape(words("data.stale"))}</p>'
    return f'<div data-report="{escape(key)}" data-of="{escape(of)}">{stale}{"".join(parts)}</div>'


def _pages(start: int, size: int, found: int, everything: int, key: str, words: Words) -> str:
    where = words("data.range", first=start + 1, last=min(start + size, found), n=found, all=f"{everything:,}")
    turns = "".join(
        f'<button data-act="{act}" data-run="{escape(key)}" id="data-{act}" {"" if there else "disabled"}>'
        f"{escape(words(f'data.{act}'))}</button>"
        for act, there in (("previous", start > 0), ("next", start + size < found))
    )
    return f'<div class="pages"><h3>{escape(where)}</h3>{turns}</div>'


def _table(sources: list[dict[str, Any]], words: Words) -> str:
    columns = ("source", "format", "rows", "kept", "dropped", "truncated", "samples", "tokens", "trained")
    head = "".join(
        f"<th{'' if i < 2 else ' class=n'}>{escape(words(f'data.{name}'))}</th>" for i, name in enumerate(columns)
    )
    rows = []
    for source in sources:
        trained = source["trained_tokens"] / max(source["tokens"], 1)
        numbers = (
            source["taken"],
            source["kept"],
            source["taken"] - source["kept"],
            source["truncated_rows"],
            source["samples"],
            source["tokens"],
        )
        cells = "".join(f'<td class="n">{number:,}</td>' for number in numbers)
        share = f'<td class="n{"" if trained else " fail"}">{trained:.0%}</td>'
        rows.append(f"<tr><td>{escape(source['name'])}</td><td>{escape(source['format'])}</td>{cells}{share}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _source(source: dict[str, Any], rows: dict[str, str], words: Words) -> str:
    read = ", ".join(ours if ours == theirs else f"{ours} ← {theirs}" for ours, theirs in source["columns"].items())
    lines = [("", words("data.columns", columns=read))]
    if source["unused"]:
        lines.append(("warn", words("data.unused", columns=", ".join(source["unused"]))))
    whole = []
    for kind, style in (("dropped", "fail"), ("truncated", "warn"), ("notes", "warn")):
        for reason, found in source[kind].items():
            what = words(f"data.{kind}_because", reason=words.said(reason), n=f"{found['count']:,}")
            whole.append(f'<p class="{style}">{escape(what)}</p>')
            for place in found["rows"][:_ROWS]:
                text = visible(rows.get(place, ""))
                summary = f"<summary>{escape(words('data.row', place=place))}</summary>"
                keep = escape(f"{source['name']} {kind} {reason} {place}")
                whole.append(f'<details data-keep="{keep}">{summary}<pre tabindex="0">{text}</pre></details>')
            if found["count"] > _ROWS:
                rest = found["count"] - _ROWS
                whole.append(f'<p class="help">{escape(words("data.more", n=f"{rest:,}"))}</p>')
    told = "".join(f'<p class="{style}">{escape(text)}</p>' for style, text in lines) + "".join(whole)
    highest = max((count for _, count in source["lengths"]), default=0)
    bars = "".join(
        f'<span>≤ {bound:,}</span><i style="width:{count / max(highest, 1):.1%}"></i><span>{count:,}</span>'
        for bound, count in source["lengths"]
    )
    hist = f"<p class=help>{escape(words('data.lengths'))}</p><div class=hist>{bars}</div>" if bars else ""
    return f'<section class="card"><header><h3>{escape(source["name"])}</h3></header>{told}{hist}</section>'


def _sample(number: int, sample: dict[str, Any], words: Words) -> str:
    title = words("data.sample", number=number, tokens=f"{sample['tokens']:,}", trained=f"{sample['trained']:,}")
    where = f'<span class="help">{escape(words.said(sample["where"]))}</span>'
    pieces = []
    for piece in sample["pieces"]:
        kinds = " ".join(name for name, on in (("t", piece["trained"]), ("c", piece["control"])) if on)
        pieces.append(f'<bdi class="{kinds}">{visible(piece["text"])}</bdi>')
    shown = f'<div class="sample">{"".join(pieces)}</div>'
    return f'<section class="card"><header><h3>{escape(title)}</h3>{where}</header>{shown}</section>'
