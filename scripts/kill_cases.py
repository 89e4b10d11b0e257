"""The runs that ``kill_test.py`` kills: their recipes and data."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

from harness import write_lines

LENGTH = 48  # tokens of a row
LORA = {"type": "lora", "rank": 4, "dropout": 0.1}
Tree = dict[str, Any]
REWARDS = """
def letters(completions, answer, **_):
    return [len(set(one)) + 0.1 * told for one, told in zip(completions, answer)]
"""


def write_data(room: Path, numbers: random.Random) -> None:
    """Writes rows of every kind, named after their record, and a reward function."""
    sums = [[numbers.randint(1, 99) for _ in range(numbers.randint(2, 6))] for _ in range(64)]
    for number, one in enumerate(sums):
        one.append(number)  # no two rows are equal
    right, wrong = ([f"{sum(one) + off}" for one in sums] for off in (0, 7))
    asked = [{"prompt": f"Add {one}."} for one in sums]
    rows = {
        "conversation": [{**ask, "completion": good} for ask, good in zip(asked, right, strict=True)],
        "preference": [
            {**ask, "chosen": good, "rejected": bad} for ask, good, bad in zip(asked, right, wrong, strict=True)
        ],
        "rated": [
            {**ask, "completion": (right, wrong)[number % 2][number], "label": number % 2 == 0}
            for number, ask in enumerate(asked)
        ],
        "prompt": [{**ask, "answer": sum(one)} for ask, one in zip(asked, sums, strict=True)],
    }
    for name, made in rows.items():
        write_lines(room / f"{name}.jsonl", made)
    (room / "rewards.py").write_text(REWARDS, encoding="utf-8")


def of_methods(room: Path) -> dict[str, Tree]:
    """Every method but ``sft`` and ``pretrain``: name → sections of the recipe.

    Taking turns: packing, LoRA with dropout or full fine-tuning, and with it the reference that is computed before
    training.
    """
    functions = [{"function": "letters", "file": str(room / "rewards.py")}]
    answers = {"num_generations": 2, "max_completion_length": 6, "rewards": functions}
    teacher = {"type": "distill", "teacher": "builtin:qwen2-small", "beta": 0.4, "temperature": 2.0, "sft_weight": 0.3}
    own = {"on_policy": 0.5, "max_completion_length": 4}
    kinds: list[tuple[str, str, str, Tree]] = [
        ("dpo", "preference", "lora", {"type": "dpo"}),
        ("dpo-precomputed", "preference", "lora", {"type": "dpo", "reference": "precomputed", "loss": "ipo"}),
        ("kto", "rated", "full", {"type": "kto", "group_size": 2}),
        ("reward", "preference", "lora", {"type": "reward", "center_coefficient": 0.01}),
        ("simpo", "preference", "full", {"type": "simpo"}),
        ("orpo", "preference", "lora", {"type": "orpo"}),
        ("cpo", "preference", "full", {"type": "cpo"}),
        ("grpo", "prompt", "lora", {"type": "grpo", **answers, "beta": 0.1, "dynamic_sampling": 1}),
        ("grpo-iterations", "prompt", "full", {"type": "grpo", **answers, "num_iterations": 2}),
        ("distill", "conversation", "lora", teacher),
        ("distill-own", "conversation", "full", {**teacher, **own}),
    ]
    found = {}
    for number, (name, rows, adapter, method) in enumerate(kinds):
        found[name] = {
            "precision": "fp32",
            "adapter": LORA if adapter == "lora" else "none",
            "data": {"train": str(room / f"{rows}.jsonl"), "packing": number % 2 == 0, "eval_split": 8},
            "method": method,
            "training": {
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 1 + number % 2,
                "max_steps": 8,
                "eval_steps": 4,
            },
        }
    return found


def alone() -> dict[str, Tree]:
    """bf16/fp32 × LoRA/full × packed or not: name → sections of the recipe.

    Taking turns: accumulation, batches of as many tokens as fit, grouped by length, and the best weights as the result
    with early stopping; the last one (fp32, full, padded) has Muon.
    """
    found = {}
    kinds = itertools.product(("bf16", "fp32"), ("lora", "full"), (True, False))
    for number, (precision, adapter, packing) in enumerate(kinds):
        passes, by_tokens, best = 1 + number.bit_count() % 2, number % 6 == 1, number % 3 == 1
        optim = "muon" if number == 7 else "adamw"
        rows = "packed" if packing else "tokens" if by_tokens else "padded"
        training: Tree = {"gradient_accumulation_steps": passes, "optim": optim}
        if by_tokens:
            training["tokens_per_batch"] = 4 * LENGTH // passes
        else:
            training["per_device_train_batch_size"] = 4 // passes
        if best:
            training |= {"load_best": True, "early_stopping_patience": 3}
        name = "-".join([precision, adapter, rows, f"x{passes}", *(["best"] if best else []), optim])
        found[name] = {
            "precision": precision,
            "adapter": LORA if adapter == "lora" else "none",
            "data": {"packing": packing, "eval_split": 8, "group_by_length": by_tokens},
            "training": {**training, "max_steps": 20, "eval_steps": 4},
        }
    return found


def shared() -> dict[str, Tree]:
    """Several processes that share a model: name → sections of the recipe."""
    found = {}
    for strategy, adapter in (("fsdp2", "full"), ("fsdp2", "lora"), ("ddp", "full")):
        found[f"{strategy}-{adapter}"] = {
            "precision": "fp32",
            "adapter": LORA if adapter == "lora" else "none",
            "data": {"packing": True},
            "distributed": {"strategy": strategy},
            "training": {"per_device_train_batch_size": 2, "max_steps": 16},
        }
    return found
