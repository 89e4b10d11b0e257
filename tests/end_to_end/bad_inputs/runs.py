"""Run folders, output folders, and the verbs that read what a run has left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from bad_inputs.case import RECIPE, ROW, Case

from halftune.config.load import load_config
from halftune.config.render import resolved_yaml

RUN = "trained"


def a_run(adapter: str = "lora") -> Path:
    """A finished run of the builtin model in ``trained``, kept for the other cases of this process."""
    kept = Path(os.environ["HALFTUNE_BAD_INPUT_RUNS"]) / adapter
    if not kept.is_dir():
        from halftune import cli

        text = RECIPE.replace("output_dir: run", f"output_dir: {kept}") + f"adapter: {adapter}\n"
        Path("made.yaml").write_text(text)
        Path("rows.jsonl").write_text(ROW)
        assert cli.run_verb("train", ["--config", "made.yaml"]) == 0
    shutil.copytree(kept, RUN)
    Path(RUN, "resolved.yaml").write_text(Path(RUN, "resolved.yaml").read_text().replace(str(kept), RUN))
    return Path(RUN)


def damaged(name: str, how: str) -> None:
    path = a_run() / name
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    else:
        path.write_text(how)


def pickled_adapter() -> None:
    """Of an earlier version, whose results are not sealed."""
    final = a_run() / "final"
    (final / "manifest.json").unlink()
    (final.parent / "finished.json").write_text('{"step": 1, "time": 1.0}')
    (final / "adapter_model.safetensors").rename(final / "adapter_model.bin")


def wrong_base() -> None:
    path = a_run() / "resolved.yaml"
    path.write_text(path.read_text().replace("builtin:qwen2-tiny", "builtin:llama-tiny"))


def strangers() -> None:
    Path("run").mkdir()
    Path("run/thesis.tex").write_text("ten years of work")


def a_begun_run() -> None:
    """What a run leaves in ``trained`` before its first checkpoint: a line of metrics; made without torch."""
    Path("x.yaml").write_text(output(RUN))
    Path(RUN).mkdir()
    Path(RUN, "resolved.yaml").write_text(resolved_yaml(load_config("x.yaml")))
    Path(RUN, "metrics.jsonl").write_text('{"step": 1}\n')


def another_run() -> None:
    a_begun_run()
    Path("x.yaml").write_text(RECIPE.replace("output_dir: run", f"output_dir: {RUN}") + "  learning_rate: 0.1\n")


def used_run() -> None:
    a_begun_run()
    Path("x.yaml").write_text(output(RUN) + "  resume: never\n")


def half_a_checkpoint() -> None:
    folder = Path("old/checkpoint-3")
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    Path("x.yaml").write_text(RECIPE + f"  resume: {folder}\n")


def output(name: str) -> str:
    return RECIPE.replace("output_dir: run", f"output_dir: {name}")


CHAT, EXPORT = f"chat {RUN} --prompt x", f"export {RUN} --output out"
CASES = (
    Case(
        "an output folder with unrelated files",
        make=strangers,
        says=("run", "thesis.tex", "output_dir"),
        error=("train.output_dir_taken",),
    ),
    Case(
        "an output folder with another run", make=another_run, says=(RUN, "learning_rate"), error=("train.run_changed",)
    ),
    Case(
        "an output folder with a run, and `resume: never`",
        make=used_run,
        says=(RUN, "never"),
        error=("train.output_dir_taken",),
    ),
    Case(
        "an invalid checkpoint",
        make=half_a_checkpoint,
        code=5,
        says=("old/checkpoint-3", "checkpoint.json", "auto"),
        error=("train.checkpoint_damaged",),
    ),
    Case(
        "an output folder that is a file",
        output("rows.jsonl"),
        says=("x.yaml:7", "is a file"),
        error=("config.output_dir_unusable",),
    ),
    Case(
        "an output folder below a file",
        output("rows.jsonl/run"),
        says=("x.yaml:7", "is a file"),
        error=("config.output_dir_unusable",),
    ),
    Case(
        "an output folder without write permission",
        output("locked/run"),
        make=lambda: os.mkdir("locked", 0o555),
        unprivileged=True,
        says=("x.yaml:7", "no permission to write"),
        error=("config.output_dir_unusable",),
    ),
    Case(
        "a data file without read permission",
        RECIPE.replace("rows.jsonl", "secret.jsonl"),
        make=lambda: os.close(os.open("secret.jsonl", os.O_CREAT | os.O_WRONLY, 0o000)),
        unprivileged=True,
        says=("x.yaml:4", "secret.jsonl"),
        error=("core.unreadable", "config.output_dir_unusable"),
    ),
    Case(
        "an output folder with too long a name",
        output("r" * 300),
        says=("x.yaml:7", "too long"),
        error=("config.output_dir_unusable",),
    ),
    Case(
        "a missing checkpoint",
        RECIPE + "  resume: run/checkpoint-9\n",
        says=("no such checkpoint",),
        error=("train.checkpoint_not_found",),
    ),
    Case(
        "a cache folder that is a file",
        environment={"HALFTUNE_CACHE": "rows.jsonl"},
        code=5,
        needs_torch=True,
        says=("HALFTUNE_CACHE",),
        error=("core.cache_not_writable",),
    ),
    Case(
        "chat with a missing folder",
        command="chat gone",
        code=3,
        says=("gone", "found no file or folder"),
        error=("config.not_a_run_folder",),
    ),
    Case(
        "chat with a folder that is not a run",
        command="chat .",
        code=3,
        says=("not one of: a run folder",),
        error=("config.not_a_run_folder",),
    ),
    Case(
        "chat with a recipe that was not trained",
        command="chat x.yaml",
        code=3,
        says=("has not been trained", "train --config"),
        error=("model.run_unfinished",),
    ),
    Case(
        "chat with an empty standard input",
        make=a_run,
        command=f"chat {RUN} --prompt -",
        says=("standard input",),
        needs_torch=True,
        error=("infer.no_prompt",),
    ),
    Case(
        "`evaluate` of a missing folder",
        command="evaluate ./gone",
        code=3,
        needs_torch=True,
        says=("./gone",),
        error=("model.not_found",),
    ),
    Case(
        "`evaluate` of a plain model without data",
        command="evaluate builtin:qwen2-tiny",
        needs_torch=True,
        says=("--data",),
        error=("evaluate.no_data",),
    ),
    Case(
        "`evaluate` with an unknown metric",
        command="evaluate run --metrics chfr",
        needs_torch=True,
        says=("chrf",),
        error=("evaluate.unknown_metric",),
    ),
    Case(
        "`evaluate` with a limit on a number that is not measured",
        command="evaluate run --fail-below exact=0.5",
        needs_torch=True,
        says=("exact",),
        error=("evaluate.unknown_metric",),
    ),
    Case(
        "chat with a missing adapter",
        make=lambda: damaged("final/adapter_model.safetensors", "gone"),
        command=CHAT,
        code=3,
        needs_torch=True,
        says=("adapter_model.safetensors",),
        error=("model.result_damaged",),
    ),
    Case(
        "chat with a truncated adapter",
        make=lambda: damaged("final/adapter_model.safetensors", "cut"),
        command=CHAT,
        code=3,
        needs_torch=True,
        says=("adapter_model.safetensors", "bytes instead of"),
        error=("model.result_damaged",),
    ),
    Case(
        "chat with an adapter that is a pickle",
        make=pickled_adapter,
        command=CHAT,
        code=3,
        needs_torch=True,
        says=("adapter_model.bin", "python -c", "save_file"),
        error=("model.pickle_refused",),
    ),
    Case(
        "chat with a corrupt adapter config",
        make=lambda: damaged("final/adapter_config.json", '{"r":\n}'),
        command=CHAT,
        code=3,
        needs_torch=True,
        says=("adapter_config.json", "train --config"),
        error=("model.result_damaged",),
    ),
    Case(
        "chat with an adapter of another model",
        make=wrong_base,
        command=CHAT,
        code=3,
        needs_torch=True,
        says=("adapter",),
        error=("model.adapter_mismatch",),
    ),
    Case(
        "chat with a corrupt recipe in the run folder",
        make=lambda: damaged("resolved.yaml", "model: ["),
        command=CHAT,
        needs_torch=True,
        says=("resolved.yaml:1",),
        error=("config.invalid_yaml",),
    ),
    Case(
        "export of a missing run",
        command="export gone --output out",
        code=3,
        says=("found no file or folder",),
        error=("config.not_a_run_folder",),
    ),
    Case(
        "export to a file",
        make=a_run,
        command=f"export {RUN} --output rows.jsonl",
        code=3,
        needs_torch=True,
        says=("rows.jsonl", "is a file"),
        error=("export.output_unusable",),
    ),
    Case(
        "export to a folder with unrelated files",
        make=lambda: (a_run(), strangers()),
        command=f"export {RUN} --output run",
        code=3,
        needs_torch=True,
        says=("unrelated files",),
        error=("export.output_unusable",),
    ),
    Case(
        "export to the run's own folder",
        make=a_run,
        command=f"export {RUN} --output {RUN}/final",
        code=3,
        needs_torch=True,
        says=("belongs to the run",),
        error=("export.output_unusable",),
    ),
    Case(
        "export of an adapter of another model",
        make=wrong_base,
        command=EXPORT,
        code=3,
        needs_torch=True,
        says=("adapter",),
        error=("model.adapter_mismatch",),
    ),
)
