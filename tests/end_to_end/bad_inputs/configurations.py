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
    Case(
        "a misspelt key",
        changed("max_steps", "max_stepz"),
        says=("x.yaml:8", "did you mean training.max_steps"),
        error=("config.unknown_key",),
    ),
    Case(
        "an unknown key",
        RECIPE + "colour: blue\n",
        says=("x.yaml:9", "colour", "unknown key"),
        error=("config.unknown_key",),
    ),
    Case(
        "a key in the wrong section",
        RECIPE + "learning_rate: 1\n",
        says=("x.yaml:9", "training.learning_rate"),
        error=("config.unknown_key",),
    ),
    Case(
        "a value of the wrong type",
        changed("max_steps: 1", "max_steps: soon"),
        says=("x.yaml:8", "max_steps", "soon"),
        error=("config.invalid_value",),
    ),
    Case(
        "a quoted word for a boolean",
        RECIPE + '  torch_compile: "no"\n',
        says=("x.yaml:9", "true or false"),
        error=("config.invalid_value",),
    ),
    Case(
        "`yes` for a boolean",
        RECIPE + "  torch_compile: yes\n",
        says=("x.yaml:9", "write true"),
        error=("config.invalid_value",),
    ),
    Case(
        "a number in quotes",
        changed("max_steps: 1", 'max_steps: "1"'),
        says=("x.yaml:8", "without quotes"),
        error=("config.invalid_value",),
    ),
    Case(
        "an integer with too many digits",
        changed("max_steps: 1", f"max_steps: {'9' * 5000}"),
        says=("x.yaml:8", "max_steps"),
        error=("config.invalid_value",),
    ),
    Case(
        "an integer above 64 bits",
        RECIPE + f"  seed: {2**70}\n",
        says=("x.yaml:9", "training.seed"),
        error=("config.invalid_value",),
    ),
    Case(
        "not a number",
        RECIPE + "  learning_rate: .nan\n",
        says=("x.yaml:9", "learning_rate", "nan"),
        error=("config.invalid_value",),
    ),
    Case(
        "infinity",
        RECIPE + "  learning_rate: .inf\n",
        says=("x.yaml:9", "learning_rate", "inf"),
        error=("config.invalid_value",),
    ),
    Case(
        "a key without a value",
        changed("max_length: 64", "max_length:"),
        says=("x.yaml:5", "has no value"),
        error=("config.invalid_value",),
    ),
    Case(
        "a missing section",
        "model: {name_or_path: builtin:qwen2-tiny}\n",
        says=("data", "training", "missing"),
        error=("config.missing_key", "config.missing_key"),
    ),
    Case(
        "a flash backend with fp32",
        RECIPE + "attention: fa2\n",
        says=("x.yaml:9", "attention", "fp32", "fa2"),
        error=("config.keys_conflict",),
    ),
    Case(
        "both bf16 and fp16",
        changed("precision: fp32", "bf16: true\nfp16: true"),
        says=("bf16", "fp16"),
        error=("config.keys_conflict",),
    ),
    Case(
        "betas of Adam with another optimizer",
        RECIPE + "  optim: sgd\n  adam_beta1: 0.8\n",
        says=("adam_beta1", "sgd"),
        error=("config.no_effect",),
    ),
    Case(
        "warm-up as long as the run",
        RECIPE + "  warmup_steps: 5\n",
        says=("warmup_steps", "never end"),
        error=("config.out_of_range",),
    ),
    Case(
        "evaluation options without evaluation data",
        RECIPE + "  load_best: true\n",
        says=("load_best", "evaluation data"),
        error=("config.needs_eval_data",),
    ),
    Case(
        "a misspelt builtin model",
        changed("qwen2-tiny", "qwen2-tin"),
        says=("did you mean builtin:qwen2-tiny",),
        error=("core.unknown_builtin",),
    ),
    Case(
        "an unknown logger",
        RECIPE + "logging: {report_to: [tensorbord]}\n",
        says=("did you mean tensorboard",),
        error=("config.invalid_value",),
    ),
    Case(
        "a duplicate key",
        RECIPE + "precision: bf16\n",
        says=("x.yaml:9", "duplicate key", "x.yaml:2"),
        error=("config.duplicate_key",),
    ),
    Case(
        "a tab as indentation",
        changed("  train:", "\ttrain:"),
        says=("x.yaml:4", "a tab"),
        error=("config.invalid_yaml",),
    ),
    Case(
        "no space after a colon",
        changed("precision: fp32", "precision:fp32"),
        says=("x.yaml:2", "space after the key"),
        error=("config.invalid_yaml",),
    ),
    Case("an open bracket", "model: [", says=("x.yaml:1", "unclosed"), error=("config.invalid_yaml",)),
    Case("an empty file", "", says=("x.yaml: empty file",), error=("config.empty",)),
    Case("only comments", "# nothing\n", says=("x.yaml: empty file",), error=("config.empty",)),
    Case(
        "two documents in one file",
        RECIPE + "---\n" + RECIPE,
        says=("x.yaml:9", "second document"),
        error=("config.invalid_yaml",),
    ),
    Case(
        "a list instead of keys", "- model\n- data\n", says=("x.yaml:1", "got a list"), error=("config.not_a_mapping",)
    ),
    Case(
        "JSON rows instead of a recipe",
        '{"prompt": "x"}\n{"prompt": "y"}\n',
        says=("x.yaml",),
        error=("config.invalid_yaml",),
    ),
    Case(
        "an alias without its anchor",
        changed("precision: fp32", "precision: *x"),
        says=("x.yaml:2", "alias"),
        error=("config.invalid_yaml",),
    ),
    Case("an anchor that contains itself", "model: &a [*a]\n", says=("x.yaml",), error=("config.too_large",)),
    Case("exponential aliases (a YAML bomb)", BOMB, says=("x.yaml", "too many"), error=("config.too_large",)),
    Case("brackets nested 3,000 levels deep", DEEP, says=("x.yaml",), error=("config.too_large",)),
    Case(
        "a YAML tag that creates Python objects",
        "model: !!python/object/apply:os.system [id]\n",
        says=("x.yaml:1", "tag"),
        error=("config.yaml_tag_refused", "config.invalid_value", "config.missing_key", "config.missing_key"),
    ),
    Case("Latin-1 text", b"model: {name_or_path: caf\xe9}\n", says=("x.yaml:1", "not UTF-8"), error=("core.not_utf8",)),
    Case("UTF-16 text", RECIPE.encode("utf-16"), says=("x.yaml", "UTF-16"), error=("core.not_utf8",)),
    Case("a control character", "model: \x00\n", says=("x.yaml:1", "U+0000"), error=("config.invalid_yaml",)),
    Case("a megabyte of text", "#" * (1 << 20), says=("x.yaml", "too large"), error=("config.too_large",)),
    Case(
        "a config of another framework",
        "stage: sft\nmodel_name_or_path: a/b\nlora_rank: 8\n",
        says=("halftune convert",),
        error=("config.foreign_config",),
    ),
    Case(
        "a missing recipe",
        command="train --config gone.yaml",
        says=("gone.yaml", "no such file"),
        error=("config.file_not_found",),
    ),
    Case("a recipe that is a folder", command="plan --config .", says=("got a folder",), error=("config.not_a_file",)),
    Case(
        "a recipe that is a broken symbolic link",
        make=lambda: os.symlink("gone", "link.yaml"),
        command="plan --config link.yaml",
        says=("link.yaml", "link"),
        error=("core.broken_link",),
    ),
    Case("no recipe given", command="train x.yaml", says=("--config x.yaml",), error=("cli.no_recipe",)),
    Case("an unknown option", command="train --confg x.yaml", says=("--confg",)),
    Case(
        "an override without a value",
        command="train --config x.yaml training.seed",
        says=("training.seed",),
        error=("config.bad_override",),
    ),
    Case(
        "an override of an unknown key",
        command="train --config x.yaml training.sead=1",
        says=("training.seed",),
        error=("config.unknown_key",),
    ),
    Case(
        "an override of the wrong type",
        command="train --config x.yaml training.seed=x",
        says=("training.seed", "x"),
        error=("config.invalid_value",),
    ),
    Case(
        "a launcher variable that is not a number",
        environment={"WORLD_SIZE": "many"},
        says=("WORLD_SIZE", "many"),
        error=("launch.bad_environment",),
    ),
    Case(
        "missing launcher variables",
        environment={"WORLD_SIZE": "2", "RANK": "0"},
        says=("WORLD_SIZE", "LOCAL_RANK, MASTER_ADDR, MASTER_PORT", "torchrun"),
        error=("launch.bad_environment",),
    ),
    Case(
        "a rank out of range",
        environment={"WORLD_SIZE": "1", "RANK": "3"},
        says=("RANK", "rank 3 of 1"),
        error=("launch.bad_environment",),
    ),
    Case(
        "an unknown machine for `--hardware`",
        command="plan --config x.yaml --hardware a1000",
        says=("did you mean",),
        error=("hardware.unknown_machine",),
    ),
    Case(
        "bf16 on a machine without bf16 units",
        changed("fp32", "bf16"),
        command="plan --config x.yaml --hardware t4",
        says=("bf16", "T4"),
        error=("precision.compute_unavailable",),
    ),
    Case("fp16 on a CPU", changed("fp32", "fp16"), says=("fp16", "CPU"), error=("precision.compute_unavailable",)),
    Case(
        "a flash backend on a CPU",
        changed("fp32", "bf16") + "attention: fa2\n",
        says=("fa2",),
        error=("attention.backend_unavailable",),
    ),
    Case(
        "a flash backend that is not installed",
        changed("fp32", "bf16") + "attention: fa3\n",
        command="plan --config x.yaml --hardware h100",
        says=("fa3", "not installed"),
        error=("attention.backend_unavailable",),
    ),
    Case(
        "a recipe that depends on itself",
        "depends_on: [x.yaml]\n" + RECIPE,
        says=("depends_on",),
        error=("config.dependency_circle",),
    ),
    Case(
        "`--rerun` of a missing run",
        command="train --rerun gone",
        says=("gone", "no such run folder"),
        error=("config.not_a_run_folder",),
    ),
    Case(
        "a missing chat template",
        changed("qwen2-tiny", 'qwen2-tiny", chat_template: "t.jinja'),
        says=("t.jinja",),
        error=("config.bad_chat_template",),
    ),
    Case(
        "no home folder",
        environment={"HALFTUNE_CACHE": "~nobody-such/x"},
        needs_torch=True,
        says=("HALFTUNE_CACHE",),
        error=("core.cache_not_writable",),
    ),
    Case(
        "`convert` of invalid YAML",
        make=lambda: Path("old.yaml").write_text("stage: sft\nlora_rank: [\n"),
        command="convert old.yaml",
        says=("old.yaml",),
        error=("config.invalid_yaml",),
    ),
    Case(
        "`convert` of a halftune recipe",
        command="convert x.yaml",
        says=("recipe already",),
        error=("convert.not_recognised",),
    ),
    Case(
        "`convert` to an existing file",
        make=lambda: Path("old.yaml").write_text(OLD),
        command="convert old.yaml -o x.yaml",
        says=("file exists", "--force"),
        error=("convert.output_exists",),
    ),
    Case(
        "`convert` to a missing folder",
        make=lambda: Path("old.yaml").write_text(OLD),
        command="convert old.yaml -o gone/new.yaml",
        says=("gone/new.yaml", "cannot be written"),
        error=("core.cannot_write",),
    ),
)
