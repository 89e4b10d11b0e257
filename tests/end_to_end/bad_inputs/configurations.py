"""Mistakes in the YAML file and on the command line."""

from __future__ import annotations

import os
from pathlib import Path

from bad_inputs.case import RECIPE, Case

DEEP = "model: " + "[" * 3000
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def changed(old: str, new: str) -> str:
    assert old in RECIPE
    return RECIPE.replace(old, new)


OLD = "stage: sft\nmodel_name_or_path: a/b\ndataset: x\nfinetuning_type: lora\nlora_rank: 8\n"
CASES = (
    Case("a misspelt key", changed("max_steps", "max_stepz"), says=("x.yaml:8", "did you mean training.max_steps")),
    Case("an unknown key", RECIPE + "colour: blue\n", says=("x.yaml:9", "colour", "unknown key")),
    Case("a key in the wrong section", RECIPE + "learning_rate: 1\n", says=("x.yaml:9", "training.learning_rate")),
    Case(
        "a value of the wrong type", changed("max_steps: 1", "max_steps: soon"), says=("x.yaml:8", "max_steps", "soon")
    ),
    Case("a quoted word for a flag", RECIPE + '  torch_compile: "no"\n', says=("x.yaml:9", "true or false")),
    Case("a flag that says yes", RECIPE + "  torch_compile: yes\n", says=("x.yaml:9", "write true")),
    Case("a number in quotes", changed("max_steps: 1", 'max_steps: "1"'), says=("x.yaml:8", "without quotes")),
    Case("a huge whole number", changed("max_steps: 1", f"max_steps: {'9' * 5000}"), says=("x.yaml:8", "max_steps")),
    Case("a number beyond 64 bits", RECIPE + f"  seed: {2**70}\n", says=("x.yaml:9", "training.seed")),
    Case("not a number", RECIPE + "  learning_rate: .nan\n", says=("x.yaml:9", "learning_rate", "nan")),
    Case("infinity", RECIPE + "  learning_rate: .inf\n", says=("x.yaml:9", "learning_rate", "inf")),
    Case("a key without a value", changed("max_length: 64", "max_length:"), says=("x.yaml:5", "has no value")),
    Case(
        "a section that is missing", "model: {name_or_path: builtin:qwen2-tiny}\n", says=("data", "training", "missing")
    ),
    Case("a flash backend with fp32", RECIPE + "attention: fa2\n", says=("x.yaml:9", "attention", "fp32", "fa2")),
    Case("both bf16 and fp16", changed("precision: fp32", "bf16: true\nfp16: true"), says=("bf16", "fp16")),
    Case(
        "betas of Adam beside another optimizer",
        RECIPE + "  optim: sgd\n  adam_beta1: 0.8\n",
        says=("adam_beta1", "sgd"),
    ),
    Case("warm-up as long as the run", RECIPE + "  warmup_steps: 5\n", says=("warmup_steps", "never end")),
    Case(
        "evaluation options without evaluation data",
        RECIPE + "  load_best: true\n",
        says=("load_best", "evaluation data"),
    ),
    Case("a misspelt builtin model", changed("qwen2-tiny", "qwen2-tin"), says=("did you mean builtin:qwen2-tiny",)),
    Case("an unknown logger", RECIPE + "logging: {report_to: [tensorbord]}\n", says=("did you mean tensorboard",)),
    Case("a key written twice", RECIPE + "precision: bf16\n", says=("x.yaml:9", "written twice", "line 2")),
    Case("a tab as indentation", changed("  train:", "\ttrain:"), says=("x.yaml:4", "a tab")),
    Case(
        "no space after a colon", changed("precision: fp32", "precision:fp32"), says=("x.yaml:2", "space after the key")
    ),
    Case("an open bracket", "model: [", says=("x.yaml:1", "never closed")),
    Case("an empty file", "", says=("x.yaml: is empty",)),
    Case("only comments", "# nothing\n", says=("x.yaml: is empty",)),
    Case("two documents in one file", RECIPE + "---\n" + RECIPE, says=("x.yaml:9", "second document")),
    Case("a list instead of keys", "- model\n- data\n", says=("x.yaml:1", "is a list")),
    Case("JSON rows instead of a recipe", '{"prompt": "x"}\n{"prompt": "y"}\n', says=("x.yaml",)),
    Case("an alias without its anchor", changed("precision: fp32", "precision: *x"), says=("x.yaml:2", "alias")),
    Case("an anchor that holds itself", "model: &a [*a]\n", says=("x.yaml",)),
    Case("aliases that multiply (a YAML bomb)", BOMB, says=("x.yaml", "too many")),
    Case("brackets nested 3,000 deep", DEEP, says=("x.yaml",)),
    Case(
        "a YAML tag that makes Python objects",
        "model: !!python/object/apply:os.system [id]\n",
        says=("x.yaml:1", "tag"),
    ),
    Case("Latin-1 text", b"model: {name_or_path: caf\xe9}\n", says=("x.yaml:1", "not UTF-8")),
    Case("UTF-16 text", RECIPE.encode("utf-16"), says=("x.yaml", "UTF-16")),
    Case("a control character", "model: \x00\n", says=("x.yaml:1", "U+0000")),
    Case("a megabyte of text", "#" * (1 << 20), says=("x.yaml", "too many")),
    Case(
        "a config of another framework",
        "stage: sft\nmodel_name_or_path: a/b\nlora_rank: 8\n",
        says=("halftune convert",),
    ),
    Case("a missing recipe", command="train --config gone.yaml", says=("gone.yaml", "no such file")),
    Case("a recipe that is a folder", command="plan --config .", says=("is a folder",)),
    Case(
        "a recipe that is a link to nothing",
        make=lambda: os.symlink("gone", "link.yaml"),
        command="plan --config link.yaml",
        says=("link.yaml", "link"),
    ),
    Case("no recipe named", command="train x.yaml", says=("--config x.yaml",)),
    Case("an unknown option", command="train --confg x.yaml", says=("--confg",)),
    Case("an override without a value", command="train --config x.yaml training.seed", says=("training.seed",)),
    Case("an override of an unknown key", command="train --config x.yaml training.sead=1", says=("training.seed",)),
    Case("an override of the wrong type", command="train --config x.yaml training.seed=x", says=("training.seed", "x")),
    Case("a variable that is no number", environment={"WORLD_SIZE": "many"}, says=("WORLD_SIZE", "many")),
    Case(
        "half of a launcher's variables",
        environment={"WORLD_SIZE": "2", "RANK": "0"},
        says=("WORLD_SIZE", "LOCAL_RANK, MASTER_ADDR, MASTER_PORT", "torchrun"),
    ),
    Case("a rank that is none", environment={"WORLD_SIZE": "1", "RANK": "3"}, says=("RANK", "rank 3 of 1")),
    Case("an unknown made-up machine", command="plan --config x.yaml --hardware a1000", says=("did you mean",)),
    Case(
        "bf16 on a machine without it",
        changed("fp32", "bf16"),
        command="plan --config x.yaml --hardware t4",
        says=("bf16", "T4"),
    ),
    Case("fp16 on a CPU", changed("fp32", "fp16"), says=("fp16", "CPU")),
    Case("a flash backend on a CPU", changed("fp32", "bf16") + "attention: fa2\n", says=("fa2",)),
    Case(
        "a flash backend that is not installed",
        changed("fp32", "bf16") + "attention: fa3\n",
        command="plan --config x.yaml --hardware h100",
        says=("fa3", "not installed"),
    ),
    Case(
        "a recipe that depends on itself",
        "depends_on: [x.yaml]\n" + RECIPE,
        says=("depends_on",),
    ),
    Case("`--rerun` of no run", command="train --rerun gone", says=("gone", "no such run folder")),
    Case(
        "a chat template that is missing",
        changed("qwen2-tiny", 'qwen2-tiny", chat_template: "t.jinja'),
        says=("t.jinja",),
    ),
    Case(
        "no home folder",
        environment={"HALFTUNE_CACHE": "~nobody-such/x"},
        needs_torch=True,
        says=("HALFTUNE_CACHE",),
    ),
    Case(
        "another framework's config that is damaged",
        make=lambda: Path("old.yaml").write_text("stage: sft\nlora_rank: [\n"),
        command="convert old.yaml",
        says=("old.yaml",),
    ),
    Case("`convert` of a recipe of ours", command="convert x.yaml", says=("recipe already",)),
    Case(
        "`convert` onto a file that is there",
        make=lambda: Path("old.yaml").write_text(OLD),
        command="convert old.yaml -o x.yaml",
        says=("exists already", "--force"),
    ),
    Case(
        "`convert` into a folder that is not there",
        make=lambda: Path("old.yaml").write_text(OLD),
        command="convert old.yaml -o gone/new.yaml",
        says=("gone/new.yaml", "cannot be written"),
    ),
)
