"""A data report as HTML: what became of every row, and samples with their trained tokens coloured."""

from __future__ import annotations

from html import escape
from typing import Any

from halftune_webui.labels import Words

_ROWS = 8  # row numbers that are listed


def data_view(report: dict[str, Any], words: Words) -> str:
    """The answer of ``halftune data --json``."""
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
    parts += [_source(source, words) for source in sources]
    legend = (
        f'<p class="legend"><span class="t">{escape(words("data.trained_text"))}</span>'
        f'<span>{escape(words("data.read_text"))}</span><span class="c">{escape(words("data.control"))}</span></p>'
    )
    samples = [_sample(number, sample, words) for number, sample in enumerate(report["samples"], 1)]
    return "".join(parts) + (legend + "".join(samples) if samples else "")


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


def _source(source: dict[str, Any], words: Words) -> str:
    read = ", ".join(ours if ours == theirs else f"{ours} ← {theirs}" for ours, theirs in source["columns"].items())
    lines = [("", words("data.columns", columns=read))]
    if source["unused"]:
        lines.append(("warn", words("data.unused", columns=", ".join(source["unused"]))))
    for kind, style in (("dropped", "fail"), ("truncated", "warn"), ("notes", "warn")):
        for reason, found in source[kind].items():
            listed = ", ".join(found["rows"][:_ROWS]) + (", …" if found["count"] > _ROWS else "")
            what = words(f"data.{kind}_because", reason=reason, n=f"{found['count']:,}", rows=listed)
            lines.append((style, what))
    told = "".join(f'<p class="{style}">{escape(text)}</p>' for style, text in lines)
    highest = max((count for _, count in source["lengths"]), default=0)
    bars = "".join(
        f'<span>≤ {bound:,}</span><i style="width:{count / max(highest, 1):.1%}"></i><span>{count:,}</span>'
        for bound, count in source["lengths"]
    )
    hist = f"<p class=help>{escape(words('data.lengths'))}</p><div class=hist>{bars}</div>" if bars else ""
    return f'<section class="card"><header><h3>{escape(source["name"])}</h3></header>{told}{hist}</section>'


def _sample(number: int, sample: dict[str, Any], words: Words) -> str:
    title = words("data.sample", number=number, tokens=f"{sample['tokens']:,}", trained=f"{sample['trained']:,}")
    where = f'<span class="help">{escape(sample.get("where", ""))}</span>'
    pieces = []
    for piece in sample["pieces"]:
        kinds = " ".join(name for name, on in (("t", piece["trained"]), ("c", piece["control"])) if on)
        text = escape(piece["text"])
        pieces.append(f'<span class="{kinds}">{text}</span>' if kinds else text)
    shown = f'<div class="sample">{"".join(pieces)}</div>'
    return f'<section class="card"><header><h3>{escape(title)}</h3>{where}</header>{shown}</section>'
