"""Writes the parts of README.md that halftune itself prints: plans side by side, an error, recipes.

python scripts/readme.py            writes them
python scripts/readme.py --check    exit code 1 if they are not what halftune prints now
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from halftune.config.load import load_config
from halftune.config.recipe_facts import model_facts
from halftune.config.recipes import described, find, recipes
from halftune.core.errors import HalftuneError
from halftune.hardware.catalogue import lookup
from halftune.plan import Plan, resolve

README = Path(__file__).resolve().parent.parent / "README.md"
RECIPE = "qwen_lora_bf16.yaml"
MACHINES = {"t4": "Tesla T4", "h100": "H100"}
ROWS = {
    "compute": "precision.compute", "storage": "precision.storage", "trainable": "precision.trainable",
    "grad scaler": "precision.grad_scaler", "softmax": "attention.softmax", "packed rows": "attention.varlen",
    "checkpointing": "batch.gradient_checkpointing",
}  # fmt: skip
SHOWN = (
    "llama/llama_3_1_8b_qlora_t4.yaml", "qwen/qwen3_5_4b_lora.yaml", "llama/llama_3_1_8b_lora.yaml",
    "gpt_oss/gpt_oss_20b_lora.yaml", "methods/dpo_4b.yaml", "llama/llama_3_3_70b_lora_fsdp2.yaml",
)  # fmt: skip
GIB = 2**30


def planned(recipe: str, machine: str, *words: str) -> Plan:
    """The plan of a shipped recipe on a machine of the catalogue."""
    loaded = load_config(find(Path(recipe)), list(words))
    hardware = lookup(machine)
    return resolve(loaded.run, hardware, model_facts(loaded), len(hardware.devices))


def plans() -> str:
    """One recipe on two machines: what differs, with the plan's reasons."""
    made = [planned(RECIPE, name, "precision=auto") for name in MACHINES]
    lines = ["| | " + " | ".join(MACHINES.values()) + " |", "|---|" + "---|" * len(made)]
    for title, path in ROWS.items():
        choices = [_choice(plan, path) for plan in made]
        lines.append(f"| {title} | " + " | ".join(f"**{_shown(one.value)}**: {one.reason}" for one in choices) + " |")
    memory = [f"**{plan.memory.total / GIB:.1f}** of {plan.memory.available / GIB:.1f} GiB" for plan in made]
    return "\n".join([*lines, "| memory | " + " | ".join(memory) + " |"])


def error() -> str:
    """What the recipe says on a machine without bf16."""
    try:
        planned(RECIPE, "t4")
    except HalftuneError as found:
        what = re.sub(r"^\S*/(configs/)", r"\1", found.report())
        return f"```text\n$ halftune train --config {RECIPE}        # on a T4\nhalftune train: {what}\n```"
    raise AssertionError(f"{RECIPE} is no longer refused")


def hardware() -> str:
    """Models, methods and the memory that the plan expects."""
    known = recipes()
    rows = [described(name, known[name]) for name in SHOWN]
    lines = [
        f"| {one.model} | {one.method}, {one.adapter} | {one.hardware} | {one.memory:.1f} GiB | `{one.name}` |"
        for one in rows
    ]
    return "\n".join(["| model | method | GPU | memory each, at least | recipe |", "|---|---|---|---|---|", *lines])


def _choice(plan: Plan, path: str) -> Any:
    found: Any = plan
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else str(value)


def written(text: str) -> str:
    """README with each part as halftune prints it now."""
    for name, make in (("plans", plans), ("error", error), ("hardware", hardware)):
        part = re.compile(rf"(<!-- {name}, by scripts/readme.py -->\n).*?(\n<!-- end -->)", re.DOTALL)
        if not part.search(text):
            raise SystemExit(f"README.md has no part {name}")
        made = make()
        text = part.sub(lambda found, made=made: f"{found[1]}{made}{found[2]}", text)
    return text


def main() -> None:
    """Write README.md, or compare."""
    before = README.read_text(encoding="utf-8")
    after = written(before)
    if "--check" in sys.argv[1:]:
        sys.exit(int(before != after))
    README.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
