"""What ``verify`` says of served and stored copies: no broken one is the same, no honest one is accused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import Served, serving
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from halftune.verify.answers import lead
from halftune.verify.exact import Exact, load_exact
from halftune.verify.folders import compare_files
from halftune.verify.probes import PROBES, read_probes
from halftune.verify.reference import Reference, open_reference
from halftune.verify.report import Files, Report, compare
from halftune.verify.rounding import measure_rounding
from halftune.verify.targets import Target
from halftune.verify.targets.folder import FolderTarget
from halftune.verify.targets.server import ServerTarget

COUNT = 10  # probes
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
Change = Callable[[Path], Any]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def result(made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, Exact, dict[str, Path]]:
    folder = shutil.copytree(made["result"], tmp_path_factory.mktemp("verdicts") / "result")
    probes = read_probes(folder)
    assert probes is not None
    long = sorted(probes.probes, key=lambda one: -len(one.answer))
    kept = [*[one for one in long if one.ended][: COUNT // 2], *[one for one in long if not one.ended][: COUNT // 2]]
    (folder / PROBES).write_text(probes.model_copy(update={"probes": kept}).as_json())
    exact = load_exact(folder)
    assert isinstance(exact, Exact)
    return open_reference(folder), exact, {**made, "fp32": made["merged"].with_name("merged-fp32")}


def report(reference: Reference, exact: Exact, target: Target, files: Files) -> Report:
    rounding = measure_rounding(reference.probes, exact, reference.folder, "", target.format)
    return compare(reference, exact, target, files, rounding)


def of_folder(reference: Reference, exact: Exact, folder: Path) -> Report:
    target = FolderTarget(folder)
    return report(reference, exact, target, compare_files(reference, exact, target, "", None))


def edited(name: str, **values: Any) -> Change:
    def edit(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return edit


def config(**values: Any) -> Change:
    return edited("config.json", **values)


def changed(change: Callable[[Tensors], Any], name: str = WEIGHTS) -> Change:
    def rewrite(folder: Path) -> None:
        weights = load_file(folder / name)
        change(weights)
        save_file({key: one.contiguous().clone() for key, one in weights.items()}, folder / name, {"format": "pt"})

    return rewrite


def template(old: str, new: str) -> Change:
    def replace(folder: Path) -> None:
        file = folder / "chat_template.jinja"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    return replace


def prefixed(text: str) -> Change:
    return lambda folder: (folder / "chat_template.jinja").write_text(
        text + (folder / "chat_template.jinja").read_text()
    )


def rope(theta: float) -> Change:
    def change(folder: Path) -> None:
        own = json.loads((folder / "config.json").read_text())
        config(rope_parameters={**own["rope_parameters"], "rope_theta": theta})(folder)

    return change


def between(size: float, only: str = "") -> Change:
    """The update of training at another size, in fp32."""

    def change(folder: Path) -> None:
        trained = load_file(folder.parent / "merged-fp32" / WEIGHTS)
        base = load_file(folder.parent / "base" / WEIGHTS)
        new = {
            name: base[name].float() + size * (one - base[name].float()) if only in name else one
            for name, one in trained.items()
        }
        changed(lambda weights: weights.update(new))(folder)
        config(dtype="float32")(folder)

    return change


def every(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Each matrix of the layers."""

    def rewrite(weights: Tensors) -> None:
        for name, one in weights.items():
            if one.ndim == 2 and ".layers." in name:
                weights[name] = change(one.float()).to(one.dtype)

    return changed(rewrite)


def int8(dim: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
    def rounds(one: torch.Tensor) -> torch.Tensor:
        step = (one.abs().max() if dim is None else one.abs().amax(dim, keepdim=True)) / 127
        return (one / step).round() * step

    return rounds


def cast(dtype: torch.dtype) -> Change:
    def change(folder: Path) -> None:
        exact = load_file(folder.parent / "merged-fp32" / WEIGHTS)
        changed(lambda weights: weights.update({name: one.to(dtype) for name, one in exact.items()}))(folder)
        config(dtype=str(dtype).removeprefix("torch."))(folder)

    return change


def tokenizer(change: Callable[[dict[str, Any]], Any]) -> Change:
    def rewrite(folder: Path) -> None:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return rewrite


def resharded(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="200KB")
    assert (folder / "model.safetensors.index.json").is_file()


def own_head(folder: Path) -> None:
    config(tie_word_embeddings=False)(folder)
    changed(lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"]}))(folder)


def half_ranks(name: str) -> Callable[[Tensors], None]:
    def halve(weights: Tensors) -> None:
        for key, one in weights.items():
            if name in key:
                one[: len(one) // 2] = 0

    return halve


def scaled(down: float, up: float, more: Callable[[Tensors], Any] = lambda _: None) -> Change:
    def rescale(weights: Tensors) -> None:
        for name, one in weights.items():
            one *= down if "lora_A" in name else up
        more(weights)

    return changed(rescale, ADAPTER)


def doubled_rank(folder: Path) -> None:
    """The same product, as a conversion of PiSSA writes it."""

    def double(weights: Tensors) -> None:
        for name, one in weights.items():
            weights[name] = torch.cat([one, one]) / 2 if "lora_A" in name else torch.cat([one, one], 1)

    changed(double, ADAPTER)(folder)
    edited("adapter_config.json", r=8, lora_alpha=32)(folder)


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def other_update(folder: Path) -> None:
    torch.manual_seed(3)
    trained, base = (load_file(folder.parent / one / WEIGHTS) for one in ("merged-fp32", "base"))
    moved = {
        name: (base[name].float() + (one - base[name].float()).std() * torch.randn(one.shape)).to(torch.bfloat16)
        for name, one in trained.items()
        if not one.equal(base[name].float())
    }
    changed(lambda weights: weights.update(moved))(folder)


def no_last_layer(weights: Tensors) -> None:
    for name, one in weights.items():
        if ".3." in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            one.zero_()


def shuffle(weights: Tensors) -> None:
    torch.manual_seed(3)
    for name, one in weights.items():
        weights[name] = torch.randn(one.shape) * one.std()


FOLDERS: dict[str, tuple[Change, str]] = {
    "merged twice": (between(2), "weights.beyond"),
    "half of alpha": (between(0.5), "weights.between"),
    "a third of alpha": (between(0.3), "weights.between"),
    "one projection of the base": (between(0, "0.self_attn.o_proj"), "weights.between"),
    "another run's adapter": (other_update, "weights.other_adapter"),
    "a norm × 1.01": (changed(lambda weights: weights[NORM].mul_(1.01)), "weights.differ"),
    "a norm + 0.01": (changed(lambda weights: weights[NORM].add_(0.01)), "weights.differ"),
    "rows of the embeddings swapped": (
        changed(lambda weights: weights.update({EMBED: weights[EMBED].roll(1, 0)})), "weights.embeddings"),
    "two heads swapped": (
        changed(lambda weights: weights.update({Q: weights[Q].roll(16, 0)})), "weights.differ"),
    "one weight": (changed(lambda weights: weights[DOWN][0, 0].add_(0.5)), "weights.differ"),
    "a missing bias": (changed(lambda weights: weights.pop(Q.replace("weight", "bias"))), "weights.absent"),
    "int8 per row": (every(int8(-1)), "weights"),
    "int8 per tensor": (every(int8(None)), "weights"),
    "rope_theta": (rope(12000.0), "weights.config"),
    "gelu": (config(hidden_act="gelu"), "weights.config"),
    "a layer cut": (config(num_hidden_layers=3, layer_types=["full_attention"] * 3), "weights"),
    "windows": (config(use_sliding_window=True, sliding_window=8, max_window_layers=0,
                       layer_types=["sliding_attention"] * 4), "weights.config"),
    "a shorter context": (config(max_position_embeddings=64), "weights.config"),
    "a trailing space": (template('assistant\\n"', 'assistant \\n"'), "tokens.differ"),
    "a space from the second turn on": (
        prefixed("{%- if messages | length > 2 %} {% endif %}"), "tokens.differ"),
    "tools are left out": (prefixed("{%- set tools = none %}"), "tokens.differ"),
    "a rare condition": (prefixed("{%- if messages | length == 17 %}x{% endif -%}"), "tokens.unknown"),
    "no template": (lambda folder: (folder / "chat_template.jinja").unlink(), "tokens.differ"),
    "merges removed": (tokenizer(lambda content: content["model"].update(
        merges=content["model"]["merges"][:-300])), "tokens.differ"),
    "stops: one missing": (both(edited("generation_config.json", eos_token_id=[0]), config(eos_token_id=0)),
                           "stops.missing"),
    "stops: one missing, one more": (edited("generation_config.json", eos_token_id=[0, 77]), "stops.missing"),
    "stops: one more": (lambda folder: edited("generation_config.json", eos_token_id=[
        *json.loads((folder / "generation_config.json").read_text())["eos_token_id"], 77])(folder), "stops.more"),
}  # fmt: skip
EMBED, Q = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"

HONEST_FOLDERS: dict[str, Change] = {
    "bf16": cast(torch.bfloat16),
    "fp16": cast(torch.float16),
    "fp32": cast(torch.float32),
    "resharded": resharded,
    "a head of its own with the same values": own_head,
    "unused keys": config(unsloth_version="2026.1", unsloth_fixed=True, quant_method=None),
    "a longer context": config(max_position_embeddings=8192),
    "max_window_layers with windows off": config(max_window_layers=3),
    "swish is silu": config(hidden_act="swish"),
    "a comment in the template": prefixed("{#- of somebody -#}"),
    "marks of training in the template": prefixed("{%- generation -%}{%- endgeneration -%}"),
    "the template in tokenizer_config.json": lambda folder: (
        edited("tokenizer_config.json", chat_template=(folder / "chat_template.jinja").read_text())(folder),
        (folder / "chat_template.jinja").unlink(),
    ),
}

ADAPTERS: dict[str, tuple[Change, str]] = {
    "half of alpha": (edited("adapter_config.json", lora_alpha=8), "weights.between"),
    "twice alpha": (edited("adapter_config.json", lora_alpha=32), "weights.beyond"),
    "half of the ranks": (changed(half_ranks("lora_A"), ADAPTER), "weights.differ"),
    "one o_proj": (changed(lambda weights: [one.zero_() for name, one in weights.items()
                                            if "0.self_attn.o_proj.lora_B" in name], ADAPTER), "weights.between"),
    "one number": (changed(lambda weights: next(iter(weights.values()))[0, 0].mul_(3), ADAPTER), "weights.differ"),
    "another run's": (changed(shuffle, ADAPTER), "weights.other_adapter"),
}  # fmt: skip

HONEST_ADAPTERS: dict[str, Change] = {
    "bf16": changed(lambda weights: weights.update({n: one.bfloat16() for n, one in weights.items()}), ADAPTER),
    "A × 2, B ÷ 2": scaled(2, 0.5),
    "alpha × 2, B ÷ 2": both(scaled(1, 0.5), edited("adapter_config.json", lora_alpha=32)),
    "alpha folded in": both(scaled(1, 4), edited("adapter_config.json", lora_alpha=4)),
    "rank doubled": doubled_rank,
    "rsLoRA": edited("adapter_config.json", use_rslora=True, lora_alpha=8),
}

BASES: dict[str, tuple[Change, str]] = {
    "weights + 2 %": (every(lambda one: one * 1.02), "base.differ"),
    "rope_theta": (rope(12000.0), "base.differ"),
    "a copy": (lambda folder: None, ""),
    "an unused key": (config(unsloth_fixed=True), ""),
}


def copied(source: Path, change: Change) -> Path:
    folder = source.with_name(f"copy-{source.name}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    change(folder)
    return folder


def codes(found: Report) -> list[str]:
    return [one.code for one in (*found.findings, *found.unknown)]


@pytest.mark.parametrize("name", FOLDERS)
def test_broken_folders(result: tuple[Reference, Exact, dict[str, Path]], name: str) -> None:
    reference, exact, folders = result
    change, code = FOLDERS[name]
    found = of_folder(reference, exact, copied(folders["merged"], change))
    assert found.answer == ("not known" if code.endswith("unknown") else "differs")
    assert any(one.startswith(code) for one in codes(found)), found
    assert "weights.unknown" not in codes(found)
    if name.startswith("stops: one missing, "):
        assert "stops.more" in codes(found)


@pytest.mark.parametrize("name", HONEST_FOLDERS)
def test_honest_folders(result: tuple[Reference, Exact, dict[str, Path]], name: str) -> None:
    reference, exact, folders = result
    found = of_folder(reference, exact, copied(folders["merged"], HONEST_FOLDERS[name]))
    assert (found.answer, codes(found)) == ("same", []), found


@pytest.mark.parametrize("name", [*ADAPTERS, *HONEST_ADAPTERS])
def test_adapters(result: tuple[Reference, Exact, dict[str, Path]], name: str) -> None:
    reference, exact, folders = result
    change, code = ADAPTERS[name] if name in ADAPTERS else (HONEST_ADAPTERS[name], "")
    found = of_folder(reference, exact, copied(folders["result"], change))
    assert codes(found)[:1] == ([code] if code else []), found


@pytest.mark.parametrize("name", BASES)
def test_the_base_of_an_adapter(result: tuple[Reference, Exact, dict[str, Path]], name: str) -> None:
    reference, exact, folders = result
    change, code = BASES[name]
    base = copied(folders["base"], change)
    other = edited("adapter_config.json", base_model_name_or_path=str(base))
    found = of_folder(reference, exact, copied(folders["result"], other))
    assert found.answers["base"] == ("differs" if code else "same"), found
    assert found.answer == found.answers["base"]


SERVED: dict[str, tuple[dict[str, Any], Change | None, str]] = {
    "a system text in chat": ({"system": "Be brief."}, None, "chat.prompt"),
    "a system text, and nothing is told": (
        {"system": "Be brief.", "tokenize": False, "usage": False, "logprobs": False}, None, "chat.differ"),
    "a stop text": ({"stop": "?"}, None, "stops.cut"),
    "a stop text in chat": ({"chat_stop": "?"}, None, "stops.cut"),
    "no stop": ({"stops": []}, None, "stops.missing"),
    "a layer cut": ({}, changed(no_last_layer), "weights"),
    "a layer cut, without echo": ({"echo": False}, changed(no_last_layer), "weights"),
    "rope_theta": ({}, rope(100.0), "weights"),
    "int8 per tensor": ({}, every(int8(None)), "weights"),
    "the base model": ({}, between(0), "weights.base"),
    "merged twice": ({}, between(2), "weights.beyond"),
    "half of alpha": ({}, between(0.5), "weights.between"),
    "another run's adapter": ({}, other_update, "weights"),
    "a space from the second turn on": ({}, prefixed("{%- if messages | length > 2 %} {% endif %}"), "tokens.differ"),
    "tools are left out": ({"tools": False}, None, "tokens.differ"),
    "tools are left out, and only counted": ({"tools": False, "tokenize": False}, None, "tokens.count"),
    "prompts are cut": ({"cut": 12}, None, ""),
}  # fmt: skip


def inner(reference: Reference) -> str:
    """A text inside an answer, before any token that rounding may decide."""
    for probe in reference.probes.probes:
        text = reference.tokenizer.decode([probe.answer[0]])
        if len(probe.answer) > 1 and text.strip("\ufffd ") and lead(probe, 0) > 0.03:
            return str(text)
    raise AssertionError


@pytest.mark.parametrize("name", SERVED)
def test_broken_servers(result: tuple[Reference, Exact, dict[str, Path]], name: str) -> None:
    reference, exact, folders = result
    options, change, code = SERVED[name]
    options = {key: inner(reference) if value == "?" else value for key, value in options.items()}
    folder = copied(folders["merged"], change) if change else folders["merged"]
    folder = folder.rename(folder.with_name(f"copy {name}")) if change else folder  # models are kept by name
    with serving(Served(folder, **options)) as url:
        found = report(reference, exact, ServerTarget(url), Files())
    assert found.answer == "differs", found
    assert any(one.code.startswith(code) for one in found.findings), found


@pytest.mark.parametrize("base", [True, False])
def test_a_chat_endpoint_of_another_model(result: tuple[Reference, Exact, dict[str, Path]], base: bool) -> None:
    """The base model, and half of the adapter."""
    reference, exact, folders = result
    chat = copied(folders["merged"], between(0 if base else 0.5))
    chat = chat.rename(chat.with_name(f"chat {base}"))
    with serving(Served(folders["merged"], chat=chat)) as url:
        found = report(reference, exact, ServerTarget(url), Files())
    assert codes(found) == ["chat.differ"], found


HONEST_SERVERS: dict[str, dict[str, Any]] = {
    "echo": {},
    "no echo": {"echo": False},
    "llama.cpp's form": {"echo": False, "content": True},
    "no usage": {"usage": False},
    "no tokenize": {"tokenize": False},
    "computes in bf16": {"dtype": torch.bfloat16},
    "computes in fp16": {"dtype": torch.float16},
}


@pytest.mark.parametrize("name", HONEST_SERVERS)
def test_honest_servers(result: tuple[Reference, Exact, dict[str, Path]], name: str) -> None:
    reference, exact, folders = result
    with serving(Served(folders["merged"], **HONEST_SERVERS[name])) as url:
        found = report(reference, exact, ServerTarget(url), Files())
    assert (found.answer, codes(found)) == ("same", []), found


def test_texts_alone_are_not_known(result: tuple[Reference, Exact, dict[str, Path]]) -> None:
    reference, exact, folders = result
    with serving(Served(folders["merged"], logprobs=False)) as url:
        found = report(reference, exact, ServerTarget(url), Files())
    assert (found.answer, codes(found)) == ("not known", ["weights.unknown", "chat.unknown"])
    assert found.answers["tokens"] == found.answers["stops"] == "same"
