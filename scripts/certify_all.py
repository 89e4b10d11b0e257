"""Certifies every model type of transformers for text, images with text, or audio, and writes the page of the results.

python scripts/certify_all.py                                   all types, two at a time; about an hour
python scripts/certify_all.py --kinds qwen3 gpt_oss             only these; prints them
python scripts/certify_all.py --results certified               keep each result, and go on where it was interrupted
python scripts/certify_all.py --results certified --page        the page of the results that are there

A type is certified by the default values of its config class, without tokenizer, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "compatibility.md"
HARDWARE = "h100"
LIMIT = 240.0  # seconds of wall time for one type
_YOUNGEST = "gradient checkpointing"  # the check that older results lack
MARKS = {"yes": "✓", "no": "✗", "refused": "–", "note": "·"}
# column → checks whose names begin so
COLUMNS = {
    "dtypes": ("dtypes",),
    "loss and gradients": ("padded rows", "left padding", "gradient", "train mode", "eval mode", "tied head"),
    "generation": ("generation",),
    "packing": ("packing",),
    "flash attention": ("flash attention",),
    "adapters": ("adapter",),
    "resume": ("resume",),
    "methods": ("method",),
}
HEAD = """# Compatibility

Made by `scripts/certify_all.py` on {day} with {versions}.

Each model type of transformers with a causal or image-text language model, or that trains on audio, was certified with
the default values of its config class: a small copy of the real class with random weights, planned for one {hardware}.
A model with other values may differ: `halftune certify MODEL` judges yours in a minute.

| sign | meaning |
|---|---|
| ✓ | every check of the column holds |
| – | the plan refuses something before a weight is read; listed below the table |
| ✗ | a check says no; listed below the table |
| · | not checked |

**{certified} of {count} types are certified.** {failed} fail a check. {unjudged} could not be judged: the class's
own code does not build or run a small copy of its default values. {refused} are not trained, most of them encoders.
{rest}

| column | what is checked |
|---|---|
| dtypes | the whole model without weights: the operands of attention in bf16 and fp16 |
| loss and gradients | rows padded on either side against each sample alone in transformers' eager code; train mode |
| generation | 8 tokens of a batch padded on the left, with the cache, against whole passes |
| packing | the same for samples packed into one row |
| flash attention | padded and packed rows with FlashAttention, by a kernel in torch; – if the plan takes another |
| adapters | LoRA, OFT, VeRA, IA3, LoHa and LoKr: trained, saved, loaded by peft, merged |
| resume | all trained tensors after a resumed run, to the bit |
| methods | two steps of each training method, and its plan |

"""


def kinds() -> list[str]:
    """Every model type with a causal or an image-text model, or that trains on audio."""
    from halftune.config.facts.families import _classes, causal_types
    from halftune.config.facts.media import AUDIO_FAMILIES

    return sorted(causal_types() | AUDIO_FAMILIES.keys() | set(_classes("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")))


def certified(kind: str, folder: Path) -> dict[str, Any]:
    """The certificate of a type as JSON data, or why there is none."""
    import torch

    from halftune.certify.certify import certify
    from halftune.certify.small_model import default_config
    from halftune.config.sections.model import ModelSection
    from halftune.core.errors import HalftuneError
    from halftune.hardware.catalogue import lookup
    from halftune.model.files.architectures import own_architectures
    from halftune.train.callbacks.loss_plot import LossPlot

    torch.set_num_threads(1)
    LossPlot._draw = lambda *_: None  # a quarter of the time
    try:
        with own_architectures():
            config = {**default_config(kind).to_dict(), "model_type": kind}
        (folder / "config.json").write_text(json.dumps(config))
        return certify(ModelSection(name_or_path=str(folder)), lookup(HARDWARE), kill=False).to_dict()
    except HalftuneError as error:
        return {"refused": error.what}
    except Exception as error:
        return {"broken": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"}


def _one(kind: str, output: Path) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, until the process ends
    with tempfile.TemporaryDirectory() as folder:
        found = certified(kind, Path(folder))
    partial = output.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.replace(output)


def walk(names: list[str], results: Path, jobs: int, limit: float) -> None:
    """Certify types in processes of their own, some at a time."""
    import halftune.certify.certify  # noqa: F401, shared by the processes

    context = multiprocessing.get_context("fork")
    waiting = [name for name in names if not (results / f"{name}.json").exists()]
    running: dict[str, tuple[Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            process = context.Process(target=_one, args=(name, results / f"{name}.json"))
            process.start()
            running[name] = process, time.monotonic()
        time.sleep(0.1)
        for name, (process, began) in list(running.items()):
            if process.is_alive() and time.monotonic() - began < limit:
                continue
            late = process.is_alive()
            process.kill()
            process.join()
            del running[name]
            if not (results / f"{name}.json").exists():
                why = f"not done in {limit:.0f} s" if late else f"the process ended by {process.exitcode}"
                (results / f"{name}.json").write_text(json.dumps({"broken": why}))
            print(f"{name} {time.monotonic() - began:.0f} s, {len(waiting)} left", flush=True)


def page(found: dict[str, dict[str, Any]], names: list[str]) -> str:
    """The page of the results of some of the types ``names``."""
    judged = {kind: one for kind, one in found.items() if "lines" in one}
    unjudged = {kind: one for kind, one in judged.items() if one["lines"][-1]["check"] == "small copy"}
    rows = {kind: one for kind, one in judged.items() if kind not in unjudged}
    refused = {kind: one["refused"] for kind, one in found.items() if "refused" in one}
    broken = {kind: one["broken"] for kind, one in found.items() if "broken" in one}
    passed = sum(one["certified"] for one in rows.values())
    any_row = next(iter(rows.values()))
    versions = ", ".join(f"{name} {version}" for name, version in any_row["versions"].items())
    numbers = {"certified": passed, "count": len(found), "refused": len(refused)}
    missing = sorted(set(names) - set(found))
    rest = f"Not tried yet: {', '.join(f'`{kind}`' for kind in missing)}. " if missing else ""
    older = [kind for kind, one in rows.items() if all(line["check"] != _YOUNGEST for line in one["lines"])]
    rest += f"{len(older)} were certified before gradient checkpointing was checked." if older else ""
    text = HEAD.format(
        day=date.today().isoformat(),
        versions=versions,
        hardware=any_row["hardware"],
        failed=len(rows) - passed,
        unjudged=len(unjudged) + len(broken),
        rest=rest,
        **numbers,
    )
    text += f"| model type | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}\n"
    for kind, one in rows.items():
        text += f"| `{kind}` | {' | '.join(_mark(one['lines'], heads) for heads in COLUMNS.values())} |\n"
    text += "\n## Types that could not be judged\n\n" + "".join(
        f"- `{kind}`: {_plain(one['lines'][-1]['evidence'])}\n" for kind, one in unjudged.items()
    )
    text += "".join(f"- `{kind}`: {_plain(why)}\n" for kind, why in broken.items())
    text += "\n## Checks that say no\n\n" + "".join(_failures(rows))
    text += "\n## What the plan refuses\n\n" + "".join(_refusals(rows))
    text += "\n## Types that are not trained\n\n" + "".join(
        f"- `{kind}`: {_plain(why)}\n" for kind, why in refused.items()
    )
    return text


def _failures(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What fails, each reason of a type once."""
    for kind, one in rows.items():
        reasons: dict[str, list[str]] = {}
        for line in one["lines"]:
            if line["verdict"] == "no":
                reasons.setdefault(_plain(line["evidence"]), []).append(line["check"])
        for why, checks in reasons.items():
            yield f"- `{kind}`, {', '.join(checks)}: {why}\n"


def _refusals(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The refusals, each with the types that have it; what a type's own name varies in counts as one."""
    grouped: dict[str, list[str]] = {}
    for kind, one in rows.items():
        for line in one["lines"]:
            shown = line["check"].startswith(tuple(head for heads in COLUMNS.values() for head in heads))
            if line["verdict"] == "refused" and shown:
                why = _plain(line["evidence"]).replace(kind, "this type")
                grouped.setdefault(f"{line['check']}: {why}", []).append(kind)
    for what, of in sorted(grouped.items()):
        yield f"- {what} ({', '.join(f'`{kind}`' for kind in of)})\n"


def _mark(lines: list[dict[str, Any]], heads: tuple[str, ...]) -> str:
    """The sign of a column: the worst of its lines."""
    verdicts = {line["verdict"] for line in lines if line["check"].startswith(heads)} - {"note"}
    return next((MARKS[one] for one in ("no", "refused", "yes") if one in verdicts), "·")


def _plain(text: str) -> str:
    """One line, without what a table or this machine's folders would break."""
    shown = re.sub(r"\S*site-packages/", "", re.sub(r"/tmp/\S*", "…", " ".join(text.split())))
    return shown.replace("|", "/").replace("<", "‹")


def main() -> None:
    """Walk the types and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", metavar="TYPE", help="only these model types; the page is printed")
    parser.add_argument("--results", metavar="FOLDER", help="keep the results there")
    parser.add_argument("--page", action="store_true", help="write the page of the results that are there")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="types at a time (default 2)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="S", help=f"seconds for one (default {LIMIT:.0f})"
    )
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(args.results or scratch)
        results.mkdir(parents=True, exist_ok=True)
        names = args.kinds or kinds()
        if not args.page:
            walk(names, results, args.jobs, args.limit)
        there = [name for name in names if (results / f"{name}.json").exists()]
        text = page({name: json.loads((results / f"{name}.json").read_text()) for name in there}, names)
    if args.kinds:
        print(text)
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
