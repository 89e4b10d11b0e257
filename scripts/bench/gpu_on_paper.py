"""Makes docs/measurements/gpu-on-paper.md: predicted speed of LoRA at the sizes of published models.

nice python scripts/bench/gpu_on_paper.py > docs/measurements/gpu-on-paper.md      # five minutes of one core

One more model is one more row of ``MODELS``.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import head, planned, row

from halftune.bench.paper.kinds import LORA
from halftune.bench.paper.peers import record_peer
from halftune.bench.paper.report import PaperReport, profile
from halftune.bench.paper.step import Recorded
from halftune.bench.paper.timeline import seconds_of
from halftune.bench.peak import listed_peak
from halftune.hardware.catalogue import lookup
from halftune.hardware.roofline import roofline_of

PLAIN, FUSED, FP8 = "transformers' layers", "fused layers", "fused, `linear: fp8`"
FA4, FA4_FP8 = "fused, FlashAttention-4", "fused, FlashAttention-4, `linear: fp8`"
PEFT, NF4 = "transformers with peft, SDPA", "fused, `quantization: nf4`"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"training": {"fused_layers": False}},
    FUSED: {},
    FP8: {"precision": {"compute": "bf16", "linear": "fp8"}},
    FA4_FP8: {"precision": {"compute": "bf16", "linear": "fp8"}},
    NF4: {"model": {"quantization": "nf4"}},
}
HOPPER, BF16 = ("h200", "h100"), ("h200", "h100", "a100", "rtx4090")  # whose plans are alike but for FA4 and float8
WHERE = {
    PLAIN: BF16,
    FUSED: BF16,
    PEFT: BF16,
    NF4: BF16,
    FA4: HOPPER,
    FA4_FP8: HOPPER,
    FP8: ("h200", "h100", "rtx4090"),
}
OFF = 0.94  # the correction with which the goals were set


@dataclass(frozen=True)
class Model:
    """A model of the page: its name on the hub, what its steps are, keys of its recipe, and a note below its table."""

    name: str
    what: str = "Two samples of 4,096 tokens in a packed row."
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    machines: tuple[str, ...] = BF16
    old: tuple[str, ...] = ()  # machines without bf16
    ways: tuple[str, ...] = (PLAIN, FUSED, FA4, FP8, FA4_FP8, NF4)
    detail: bool = False
    note: str = ""


QWEN, LLAMA = "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B"
DENSE = "Qwen2.5-7B"
MODELS = {
    DENSE: Model(QWEN, old=("t4",), detail=True),
    "Llama-3.1-8B": Model(LLAMA, old=("t4",)),
    "Qwen3.5-9B, a hybrid": Model(
        "Qwen/Qwen3.5-9B",
        ways=(PLAIN, FUSED, FA4),
        detail=True,
        note="Three layers of four have the gated delta rule, whose kernels take the time of `SCANS` in the roofline, "
        "which is an assumption.",
    ),
    "DPO of Llama-3.1-8B": Model(
        LLAMA,
        "Two pairs of two answers of 2,048 tokens in a packed row: 8,192 tokens. The reference is the model without its"
        " adapter, one more forward pass.",
        {"method": {"type": "dpo"}, "data": {"train": "builtin:python-pairs", "max_length": 2048}},
        machines=("h200", "h100", "a100"),
    ),
    "Qwen3-30B-A3B, experts adapted": Model(
        "Qwen/Qwen3-30B-A3B",
        "Two samples of 4,096 tokens in a packed row, with gradient checkpointing. Attention and experts are adapted.",
        {
            "adapter": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
            "training": {"gradient_checkpointing": True},
        },
        machines=("h200", "h100"),
        ways=(PLAIN, FUSED, PEFT),
        note="peft computes W + B·A for all experts of a layer in each pass, halftune multiplies B·A beside W.",
    ),
}  # fmt: skip
PUBLISHED = {DENSE: 14_110, "Llama-3.1-8B": 12_473}  # tokens/s of NeMo AutoModel on an H100 (Llama-3-8B)
# gpu.md: tokens/s on an H200, GiB
MEASURED = {
    DENSE: {
        PLAIN: (13_709, 60.5),
        FUSED: (15_989, 41.1),
        FA4: (19_226, 41.1),
        FA4_FP8: (22_267, 35.2),
        "transformers": (11_008, 80.0),
    },
    "Llama-3.1-8B": {FA4: (17_816, 43.0)},
}
Key = tuple[str, str, str]


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Sections of a recipe, those of the second over those of the first."""
    both = {**first, **second}
    sections = {name for name in first if isinstance(first[name], dict) and isinstance(second.get(name), dict)}
    return both | {name: {**first[name], **second[name]} for name in sections}


class Page:
    """Predictions of the page; a step is recorded once for machines whose plans are alike."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: dict[Key, Recorded] = {}

    def plan(self, title: str, way: str, machine: str) -> tuple[Any, Any]:
        """The recipe and its plan."""
        model = MODELS[title]
        tree: dict[str, Any] = {
            "model": {"name_or_path": model.name},
            "precision": "auto",
            "adapter": {"type": "lora", "rank": 16, "alpha": 32, "target_modules": "all-linear"},
            "data": {"train": "builtin:python-docs", "max_length": 4096, "packing": True},
            "training": {
                "output_dir": str(self.folder / "run"),
                "per_device_train_batch_size": 2,
                "gradient_checkpointing": False,
                "fused_layers": True,
            },
        }
        keys = merged(merged(tree, model.keys), WAYS.get(way, {}))
        packages = {"flash-attn-4": "4"} if way in (FA4, FA4_FP8) else {}
        loaded, plan = planned(keys, self.folder / "recipe.yaml", machine, packages=packages)
        return loaded.run, plan

    def step(self, title: str, way: str, machine: str, found: PaperReport | None = None) -> Recorded | None:
        """A recorded step, once known."""
        key = title, way, machine if machine in MODELS[title].old else "bf16"
        if found is not None:
            self.steps[key] = found.recorded
        return self.steps.get(key)

    def report(self, title: str, way: str, machine: str) -> PaperReport:
        """The prediction for one machine."""
        if way == PEFT:
            return self.peer(title, "transformers", machine)
        config, plan = self.plan(title, way, machine)
        found = profile(config, plan, lookup(machine), recorded=self.step(title, way, machine))
        self.step(title, way, machine, found)
        return found

    def of(self, title: str, recorded: Recorded, machine: str) -> PaperReport:
        """The prediction of a step that was recorded otherwise."""
        config, plan = self.plan(title, FUSED, machine)
        return profile(config, plan, lookup(machine), recorded=recorded)

    def peer(self, title: str, name: str, machine: str) -> PaperReport:
        """The prediction of another tool's step."""
        key = title, name, "bf16"
        if key not in self.steps:
            self.steps[key] = record_peer(name, *self.plan(title, FUSED, machine), lookup(machine).devices[0])
        return self.of(title, self.steps[key], machine)


COUNTS = ("launches a layer", "MB a token and layer", "host syncs", "GiB", "bound by")


def counts(found: PaperReport) -> tuple[str, ...]:
    """The cells of ``COUNTS``: of a layer, of a step, of all tensors; and what takes most of the time."""
    made, moved = found.recorded, sum(one.bytes for one in found.time.layer_kinds.values())
    tokens = made.tokens / made.micro_batches
    memory, syncs = f"{made.peak / 2**30:.1f}", str(len(made.syncs))
    return f"{found.launches_per_layer:.0f}", f"{moved / tokens / 1e6:.2f}", syncs, memory, found.time.bound


def table(page: Page, title: str) -> None:
    """Every way as a row: tokens per second by machine, and what does not depend on the machine."""
    model, columns = MODELS[title], (*MODELS[title].machines, *MODELS[title].old)
    names = [lookup(machine).devices[0].name for machine in columns]
    print(head("tokens/s", *names, *COUNTS))
    for way in model.ways:
        found = {machine: page.report(title, way, machine) for machine in model.machines if machine in WHERE[way]}
        cells = (f"{found[one].tokens_per_second:,.0f}" if one in found else "–" for one in columns)
        print(row(way, *cells, *counts(next(iter(found.values())))))
    for machine in model.old:
        for way in (PLAIN, FUSED):
            one = page.report(title, way, machine)
            cells = (f"{one.tokens_per_second:,.0f}" if column == machine else "–" for column in columns)
            print(row(f"{way}, fp16", *cells, *counts(one)))


INTRO = """# A predicted GPU step

**These are predictions.** One training step ran on meta tensors on a CPU. Each kernel takes the time of its bytes or
FLOPs at the rates of `src/halftune/hardware/roofline.py`. LoRA of rank 16 on all linear layers, bf16, every token
labelled, no checkpointing. Sizes are those of the published config.json.
Made by `python scripts/bench/gpu_on_paper.py`.

The columns after the speeds are those of the first machine. GiB: all tensors at their most, without what libraries and
the allocator need. Padded rows wait once more for each micro-batch and kind of mask. An RTX 4090 and a T4 lack the
memory for these steps: their columns compare speeds. A T4 computes in fp16, with torch's own attention."""
ERROR = """
## What is known of the error

LoRA on an H200, [measured](gpu.md). The rates of attention and of the activations between adapters are those of the
profiles of two of these steps, all others were measured alone. One GPU multiplied 6 % faster than the other. Models on
a CPU that nothing was fitted to: [a predicted CPU step](cpu-on-paper.md).
"""
AUTOMODEL = """
NeMo AutoModel's published LoRA rows on one H100: 2 × 4,096 tokens, every token labelled, no clipping. On paper:
transformers' model, SDPA, a fused norm, adapters in bf16 by Triton kernels, all logits.
"""
RATES = """
## Rates

Products and attention in TFLOP/s. Those of Hopper were measured on an H200, attention within a step (FlashAttention-3:
published, less what FlashAttention-2 loses within a step). The others are shares of data sheets:
`src/halftune/hardware/roofline.py`. A kernel takes the longer of its bytes and its FLOPs.
"""
NOT_BUILT = """
## Not built: LoRA inside the base product

A base product over `[x | x·A]` and `[W | B]` would save the passes that add an adapter's part to a base product's
result. Their share of the step is the most that can be saved. Against it: longer base products (r columns for each
adapter of the input), and every adapted weight stored again with room for B. Inputs that attention writes would have to
be copied, which costs what the pass costs.
"""
GOALS = """
## Goals

18,343 tokens/s is 1.3 × 14,110. What was measured on an H200 decides there. No H100 has run a step here.
"""


def tables(page: Page) -> None:
    """A table for each model."""
    print(INTRO)
    for title, model in MODELS.items():
        print(f"\n## {title}\n\n{model.what}{' ' + model.note if model.note else ''}\n")
        table(page, title)


def rates() -> None:
    """The rates that predictions rest on, over the data sheets' peaks."""
    print(RATES)
    kernels = ("fa2", "fa3", "fa4", "efficient")
    print(head("", "TB/s", "bf16, fp16", "of the data sheet's", "fp8", *(f"{one}, and backward" for one in kernels)))
    for machine in (*BF16, "t4"):
        name = lookup(machine).devices[0].name
        line, peak = roofline_of(name), listed_peak(name, "fp16", tf32=False)
        assert line is not None
        assert peak is not None
        half, fp8 = line.gemm["fp16"], line.gemm.get("fp8")
        pairs = [line.attention.get(one) for one in kernels]
        cells = [f"{half / 1e12:,.0f}", f"{half / peak.flops:.0%}", f"{fp8 / 1e12:,.0f}" if fp8 else "–"]
        cells += [", ".join(f"{one / 1e12:,.0f}" for one in pair) if pair else "–" for pair in pairs]
        print(row(name, f"{line.bandwidth / 1e12:.2f}", *cells))


def kernels(page: Page) -> None:
    """The kernels of some models."""
    for title in (title for title, model in MODELS.items() if model.detail):
        text = page.report(title, FUSED, HOPPER[0]).text().partition("\n")[2]
        print(f"\n## Kernels of {title}: H200, fused layers\n\n```\n{text}\n```")


def errors(page: Page) -> None:
    """Predictions beside what was measured or published."""
    print(ERROR)
    print(head("", "measured tokens/s", "predicted", "error", "measured GiB", "predicted", "error"))
    for title, ways in MEASURED.items():
        for way, (speed, memory) in ways.items():
            peer = way == "transformers"
            found = page.peer(title, way, "h200") if peer else page.report(title, way, "h200")
            guess, peak = found.tokens_per_second, found.recorded.peak / 2**30
            name = "transformers' Trainer with peft, SDPA" if peer else way
            cells = (f"{speed:,}", f"{guess:,.0f}", f"{guess / speed - 1:+.1%}")
            print(row(f"{title}, {name}", *cells, memory, f"{peak:.1f}", f"{peak / memory - 1:+.1%}"))
    print(AUTOMODEL)
    print(head("", "published tokens/s", "predicted", "of the published", "predicted, 6 % off", "launches a layer"))
    for title, speed in PUBLISHED.items():
        found = page.peer(title, "automodel", "h100")
        guess = found.tokens_per_second
        less = f"{OFF * guess:,.0f} ({OFF * guess / speed:.2f})"
        print(row(title, f"{speed:,}", f"{guess:,.0f}", f"{guess / speed:.2f}", less, counts(found)[0]))


def goals(page: Page) -> None:
    """Every goal: as measured on an H200, else as predicted, also where predictions are 6 % too high."""
    print(GOALS)
    print(head("goal", "tokens/s", "way", "predicted", "6 % off", "measured", "reached"))
    half, first = (PLAIN, FUSED, FA4), 1.3 * PUBLISHED[DENSE]
    wanted = [
        (f"{DENSE}, H200, bf16", DENSE, "h200", half, first),
        (f"{DENSE}, H100, fp8", DENSE, "h100", (FP8, FA4_FP8), first),
    ]
    for title, speed in PUBLISHED.items():
        wanted.append((f"{title}, H100, bf16: 1.2 × AutoModel", title, "h100", half, 1.2 * speed))
    for name, title, machine, ways, goal in wanted:
        for way in ways:
            speed = page.report(title, way, machine).tokens_per_second
            seen = MEASURED[title].get(way, (0,))[0] if machine == "h200" else 0
            said = ("no", "as predicted", "with 6 % off")[(speed >= goal) + (OFF * speed >= goal)]
            said = ("measured" if seen >= goal else "no") if seen else said
            print(
                row(
                    name,
                    f"{goal:,.0f}",
                    way,
                    f"{speed:,.0f}",
                    f"{OFF * speed:,.0f}",
                    f"{seen:,}" if seen else "–",
                    said,
                )
            )


def not_built(page: Page) -> None:
    """What the passes take that a base product with the adapter inside would save."""
    print(NOT_BUILT)
    print(head("share of the step", *(lookup(machine).devices[0].name for machine in BF16)))
    for title in PUBLISHED:
        shares = []
        for machine in BF16:
            found = page.report(title, FUSED, machine)
            passes = (one for one in found.recorded.launches if one.kind == LORA and one.op == "aten::addmm_")
            taken = sum(seconds_of(one, found.roofline, tf32=True) for one in passes)
            shares.append(f"{taken / found.time.seconds:.1%}")
        print(row(title, *shares))


def main() -> None:
    """Print the page."""
    with tempfile.TemporaryDirectory() as folder:
        page = Page(Path(folder))
        tables(page)
        errors(page)
        goals(page)
        not_built(page)
        rates()
        kernels(page)


if __name__ == "__main__":
    main()
