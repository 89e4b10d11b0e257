"""Export: a plain model that answers as the run's result does, in the base's dtype, never over what is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import checkpoint, finished_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from halftune.cli import main
from halftune.core.errors import ModelError
from halftune.core.manifest import MANIFEST, seal
from halftune.core.status import StatusFile, read_status
from halftune.export.merged import export_run
from halftune.infer.session import open_session
from halftune.model.result.completed_run import open_run

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IDS = torch.arange(40).reshape(2, 20)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = checkpoint(tmp_path_factory.mktemp("base") / "model", torch.bfloat16, vocab_size=4096)
    return finished_run(tmp_path_factory.mktemp("runs") / "lora", base)


def dtype_of(folder: Path) -> str:
    """The one dtype of all weights, which config.json must name."""
    (dtype,) = {str(tensor.dtype).removeprefix("torch.") for tensor in load_file(folder / "model.safetensors").values()}
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    return dtype


@pytest.mark.parametrize("place", ["base", "base/inside", "base/..", "link"])
def test_an_export_replaces_no_input_of_its_run(tmp_path: Path, place: str) -> None:
    base = checkpoint(tmp_path / "models" / "base", torch.float32)
    seal(base, MANIFEST)  # as an earlier export that is the base of this run
    run = open_run(str(finished_run(tmp_path / "lora", base)))
    (tmp_path / "models" / "link").symlink_to(base, target_is_directory=True)
    before = (base / "model.safetensors").read_bytes()
    for force in (False, True):
        with pytest.raises(ModelError) as caught:
            export_run(run, tmp_path / "models" / place, force=force)
        assert caught.value.code == "export.output_unusable"
    assert (base / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("own", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_bases_own_dtype(tmp_path: Path, own: str, precision: str) -> None:
    base = checkpoint(tmp_path / "base", DTYPES[own], vocab_size=4096)
    run = open_run(str(finished_run(tmp_path / "run", base, precision=precision)))
    export = export_run(run, tmp_path / "out")
    assert dtype_of(tmp_path / "out") == str(DTYPES[own]).removeprefix("torch.")
    assert export.stored == own
    assert "the base checkpoint's format" in export.describe()


def test_a_base_in_several_formats_is_not_called_the_source_of_one(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", torch.bfloat16, vocab_size=4096)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].float()
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    run = open_run(str(finished_run(tmp_path / "run", base)))
    export = export_run(run, tmp_path / "out")
    assert export.stored == "bf16"
    assert "1 in fp32, first model.norm.weight" in export.source
    assert "the base checkpoint's format" not in export.describe()


def test_an_export_replaces_no_result_of_another_run(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", vocab_size=4096)
    one, other = (finished_run(tmp_path / name, base, adapter="none") for name in ("one", "other"))
    for part in ("final", "final/inside", "checkpoint-1"):
        with pytest.raises(ModelError) as caught:
            export_run(open_run(str(one)), other / part, force=True)
        assert caught.value.code == "export.output_unusable"
    export_run(open_run(str(one)), other / "merged")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_exported_model_answers_as_the_run_does(tmp_path: Path, run_folder: Path, dtype: str) -> None:
    run = open_run(str(run_folder))
    export = export_run(run, tmp_path / "out", dtype)  # type: ignore[arg-type]
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    session = open_session(run)
    with torch.inference_mode():
        expected, actual = session.model(IDS).logits, alone(IDS).logits
    assert export.merge is not None
    assert float((actual - expected).norm() / expected.norm()) <= 2 * export.merge.bound
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == session.tokenizer.chat_template
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is True


def test_a_full_run_is_copied_or_rounded(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", vocab_size=4096)
    folder = finished_run(tmp_path / "run", base, adapter="none", precision="bf16")
    run = open_run(str(folder))
    copied = export_run(run, tmp_path / "copy")
    assert "copied unchanged" in copied.describe()
    assert dtype_of(tmp_path / "copy") == "bfloat16"
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == (
        folder / "final" / "model.safetensors"
    ).read_bytes()
    export_run(run, tmp_path / "rounded", "fp16")
    assert dtype_of(tmp_path / "rounded") == "float16"


def test_a_base_in_fp64_is_not_called_the_source_of_the_format(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", vocab_size=4096)
    weights = {name: tensor.double() for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    text = export_run(open_run(str(finished_run(tmp_path / "run", base))), tmp_path / "out").describe()
    assert "fp64" in text
    assert dtype_of(tmp_path / "out") == "float32"


def test_the_report_tells_what_the_format_takes(tmp_path: Path, run_folder: Path) -> None:
    text = export_run(open_run(str(run_folder)), tmp_path / "out").describe()
    assert "logit error" in text
    assert "adapter's update" in text
    assert "rounding to bf16" in text


def test_nothing_is_written_over(tmp_path: Path, run_folder: Path) -> None:
    run = open_run(str(run_folder))
    for own in (run_folder, run_folder / "final", run_folder.parent):
        with pytest.raises(ModelError, match="belongs to the run"):
            export_run(run, own, force=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(ModelError, match="unrelated files"):
        export_run(run, other, force=True)
    assert (other / "thesis.txt").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="the output is a file"):
        export_run(run, tmp_path / "file", force=True)
    export_run(run, tmp_path / "out", "fp32")
    with pytest.raises(ModelError, match="--force"):
        export_run(run, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(ModelError, match="did not write"):
        export_run(run, tmp_path / "out", force=True)
    shutil.rmtree(tmp_path / "out")
    export_run(run, tmp_path / "out")
    export_run(run, tmp_path / "out", "bf16", force=True)
    assert dtype_of(tmp_path / "out") == "bfloat16"


def test_a_refused_merge_writes_nothing(tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora import Linear

    right = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, name: 0.9 * right(self, name))
    with pytest.raises(ModelError, match="logit error"):
        export_run(open_run(str(run_folder)), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_on_the_command_line(tmp_path: Path, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["export", str(run_folder), "--output", str(tmp_path / "out")])
    assert left.value.code == 0
    assert str(tmp_path / "out") in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(["export", str(run_folder), "--output", str(tmp_path / "out")])
    assert left.value.code == 3
    assert capsys.readouterr().err.startswith("halftune export: ")


def test_a_program_reads_how_far_an_export_is(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []
    tell = StatusFile.tell

    def spy(self: StatusFile, *, urgent: bool = True, **changes: Any) -> None:
        tell(self, **changes)
        status = read_status(self.path)
        assert status is not None
        told.append((status.phase, status.step, status.total))

    monkeypatch.setattr(StatusFile, "tell", spy)
    file, out = tmp_path / "status.json", tmp_path / "out"
    command = ["export", str(run_folder), "--output", str(out), "--status", str(file)]
    with pytest.raises(SystemExit) as left:
        main(command)
    assert left.value.code == 0
    assert [phase for phase, _ in dict.fromkeys((phase, 0) for phase, _, _ in told)] == [
        "starting",
        "loading",
        "merging",
        "checking",
        "writing",
        "finished",
    ]
    layers = [(step, total) for phase, step, total in told if phase == "merging"]
    assert layers == [(step, len(layers)) for step in range(len(layers))]
    with pytest.raises(SystemExit):
        main(command)
    status = read_status(file)
    assert status is not None
    assert status.state == "failed"
    assert "already contains a model" in status.error
