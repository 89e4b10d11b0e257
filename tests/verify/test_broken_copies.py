"""Ten ways to break a model that is served: ``verify`` names the cause of each, and lets honest copies pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import a_model, finished_run, section

from halftune.cli import main
from halftune.core.manifest import MANIFEST, seal
from halftune.model.files.result import write_finished
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.verify.probes import PROBES

LAYERS = 4
Verdict = Callable[..., tuple[int, Any]]


def codes(found: Any) -> list[str]:
    return [one["code"] for one in found["findings"]]


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], name: str = "model.safetensors") -> None:
    weights = load_file(folder / name)
    change(weights)
    save_file({key: one.clone() for key, one in weights.items()}, folder / name, metadata={"format": "pt"})


def edited(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def extra_line(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(
        template.read_text().replace("{%- if add_generation_prompt", "\n{%- if add_generation_prompt", 1)
    )
    text = template.read_text()
    template.write_text(text + "{{ '\\n' }}")


def bos_twice(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text("{{ '<|im_start|>' }}" + template.read_text())


def no_stop(folder: Path) -> None:
    edited(folder / "generation_config.json", eos_token_id=[0])
    edited(folder / "config.json", eos_token_id=0)


def short_embeddings(folder: Path) -> None:
    edited(folder / "config.json", vocab_size=4000)
    changed(folder, lambda weights: weights.update({EMBED: weights[EMBED][:4000]}))


def all_but_few_embeddings(folder: Path) -> None:
    edited(folder / "config.json", vocab_size=8)
    changed(folder, lambda weights: weights.update({EMBED: weights[EMBED][:8]}))


def new_embeddings(folder: Path) -> None:
    changed(folder, lambda weights: weights[EMBED][100:].normal_(std=0.02))


def untied(folder: Path) -> None:
    edited(folder / "config.json", tie_word_embeddings=False)


def rounded_through(first: torch.dtype, second: torch.dtype) -> Callable[[Path], None]:
    def rounds(folder: Path) -> None:
        exact = load_file(folder.parent / "merged-fp32" / "model.safetensors")
        changed(folder, lambda weights: weights.update({name: one.to(first).to(second) for name, one in exact.items()}))
        edited(folder / "config.json", dtype=str(second).removeprefix("torch."))

    return rounds


def few_rows_lost(folder: Path) -> None:
    """As added tokens that were not saved."""
    changed(folder, lambda weights: weights[EMBED][-20:].zero_())


def other_rope(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    edited(folder / "config.json", rope_parameters={**config["rope_parameters"], "rope_theta": 123456.0})


def other_epsilon(folder: Path) -> None:
    edited(folder / "config.json", rms_norm_eps=1e-3)


def more_stops(folder: Path) -> None:
    edited(folder / "generation_config.json", eos_token_id=list(range(4096)))


def not_a_number(folder: Path) -> None:
    """In rows that no probe uses."""
    changed(folder, lambda weights: weights[EMBED][-20:].fill_(float("nan")))


def part_of_a_row(folder: Path) -> None:
    changed(folder, lambda weights: weights[DOWN][3, :8].zero_())


def one_column(folder: Path) -> None:
    changed(folder, lambda weights: weights[DOWN][:, 3].mul_(50))


EMBED, DOWN = "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"


def base_weights(folder: Path) -> None:
    """The copy without the adapter."""
    changed(folder, lambda weights: weights.update(load_file(folder.parent / "base" / "model.safetensors")))


def half_the_layers(folder: Path) -> None:
    own = load_file(folder.parent / "base" / "model.safetensors")
    half = {name: one for name, one in own.items() if any(f".{layer}." in name for layer in range(LAYERS // 2))}
    changed(folder, lambda weights: weights.update(half))


def doubled(folder: Path) -> None:
    own = load_file(folder.parent / "base" / "model.safetensors")

    def twice(weights: dict[str, torch.Tensor]) -> None:
        for name, one in weights.items():
            weights[name] = (2 * one.float() - own[name].float()).to(one.dtype)

    changed(folder, twice)


BREAKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "the adapter is not loaded": (base_weights, "weights.base"),
    "half of its layers are dropped": (half_the_layers, "weights.between"),
    "lora_alpha is doubled": (doubled, "weights.beyond"),
    "the template has one more line": (extra_line, "tokens.differ"),
    "BOS stands twice": (bos_twice, "tokens.bos_twice"),
    "the stop token is missing": (no_stop, "stops.missing"),
    "embeddings are cut": (short_embeddings, "weights.shape"),
    "embeddings are made anew": (new_embeddings, "weights.embeddings"),
    "embeddings are cut below what probes use": (all_but_few_embeddings, "weights.shape"),
    "a few rows of the embeddings are lost": (few_rows_lost, "weights.embeddings"),
    "rows of the embeddings are no numbers": (not_a_number, "weights.embeddings"),
    "a part of one row is lost": (part_of_a_row, "weights.differ"),
    "one column is 50 times as large": (one_column, "weights.differ"),
    "config.json has another rope_theta": (other_rope, "weights.config"),
    "config.json has another epsilon": (
        lambda folder: edited(folder / "config.json", rms_norm_eps=1e-3),
        "weights.config",
    ),
    "everything is a stop token": (more_stops, "stops.more"),
    "the tied head is untied": (untied, "weights.head"),
    "rounded to fp16 on the way to bf16": (rounded_through(torch.float16, torch.bfloat16), "weights.beyond_format"),
    "rounded to bf16 on the way to fp16": (rounded_through(torch.bfloat16, torch.float16), "weights.beyond_format"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_copy_is_named(made: dict[str, Path], name: str, verdict: Verdict) -> None:
    breaks, code = BREAKS[name]
    copy = made["merged"].parent / "copy"
    shutil.copytree(made["merged"], copy, dirs_exist_ok=True)
    try:
        breaks(copy)
        status, found = verdict(made["result"], copy)
    finally:
        shutil.rmtree(copy)
    assert status == 4
    assert codes(found)[0] == code, found


def test_honest_copies_pass(made: dict[str, Path], verdict: Verdict) -> None:
    for target in (made["merged"], made["merged"].with_name("merged-fp32"), made["result"]):
        status, found = verdict(made["result"], target)
        assert (status, found["findings"]) == (0, []), found


def test_a_key_of_training_is_no_difference(made: dict[str, Path], tmp_path: Path, verdict: Verdict) -> None:
    copy = shutil.copytree(made["merged"], tmp_path / "copy")
    edited(copy / "config.json", initializer_range=0.5)
    assert codes(verdict(made["result"], copy)[1]) == []


def test_tensors_that_peft_ignores_are_missing(made: dict[str, Path], tmp_path: Path, verdict: Verdict) -> None:
    copy = shutil.copytree(made["result"], tmp_path / "copy")
    own = json.loads((copy / "adapter_config.json").read_text())
    kept = [name for name in own["target_modules"] if name != "down_proj"]
    edited(copy / "adapter_config.json", target_modules=kept)
    assert codes(verdict(made["result"], copy)[1])[0] == "weights.between"
    shutil.copy(made["result"] / "adapter_config.json", copy)
    extra = {"base_model.model.model.layers.0.self_attn.q_proj.extra": torch.zeros(2)}
    changed(copy, lambda weights: weights.update(extra), "adapter_model.safetensors")
    assert codes(verdict(made["result"], copy)[1]) == ["weights.differ"]


def test_added_tokens(made: dict[str, Path], tmp_path: Path, verdict: Verdict) -> None:
    """An adapter with rows of its own, and its export."""
    adapter = {"type": "lora", "rank": 4, "alpha": 16, "target_modules": "all-linear"}
    model = {"name_or_path": str(made["base"]), "tokenizer": "builtin:qwen2-tiny", "tokens": {"add": ["<a>", "<b>"]}}
    run = finished_run(tmp_path / "run", made["base"], adapter=adapter, model=model)
    with pytest.raises(SystemExit) as ended:
        main(["export", str(run), "--output", str(tmp_path / "merged")])
    assert ended.value.code == 0
    for target in (tmp_path / "merged", run / "final"):
        status, found = verdict(run / "final", target)
        assert (status, found["findings"]) == (0, []), found


def test_what_was_not_compared_is_said(
    made: dict[str, Path], verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=0))
    assert "files" in dict(verdict(made["result"], made["merged"])[1]["lines"])
    monkeypatch.undo()
    assert "files" not in dict(verdict(made["result"], made["merged"])[1]["lines"])


def test_transposed_experts_are_named(tmp_path: Path, verdict: Verdict) -> None:
    """Square matrices, which every loader takes."""
    sizes = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 4096}
    whole = tmp_path / "whole"
    a_model("qwen3_moe", pad_token_id=0, **sizes).to(torch.bfloat16).save_pretrained(whole)
    load_tokenizer(section("builtin:qwen2-tiny")).save_pretrained(whole)
    copy = shutil.copytree(whole, tmp_path / "copy")

    def turn(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if ".experts." in name:
                weights[name] = weights[name].transpose(-1, -2).contiguous()

    changed(copy, turn)
    status, found = verdict(whole, copy)
    assert status == 4
    assert codes(found) == ["weights.transposed"], found


@pytest.mark.parametrize("format", ["folder", "adapter"])
def test_an_export_holds_no_rows_of_the_users_data(made: dict[str, Path], tmp_path: Path, format: str) -> None:
    run = shutil.copytree(made["run"], tmp_path / "run")
    shutil.copy(made["result"] / PROBES, run / "final")
    seal(run / "final", MANIFEST)
    write_finished(run, 1)
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "export",
                str(run),
                "--output",
                str(tmp_path / "out"),
                "--format",
                format,
                "training.allow_changes=[model]",
            ]
        )
    assert ended.value.code == 0
    assert (tmp_path / "out" / "config.json").is_file() or (tmp_path / "out" / "adapter_config.json").is_file()
    assert not (tmp_path / "out" / PROBES).exists()
