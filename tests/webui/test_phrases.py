"""What plans and problems say is known in every language of the web UI, sentence by sentence."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from published import QWEN2_5_0_5B

from halftune.config.facts import architecture
from halftune.config.facts.model import ModelFacts, facts_from_config, read_model_facts
from halftune.config.run import RunConfig
from halftune.core.error_codes import catalogue
from halftune.core.errors import HalftuneError, PlanError
from halftune.hardware import Hardware
from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune.plan import Plan, resolve
from halftune_webui.labels import FALLBACK, load_words
from halftune_webui.phrases import Phrases
from halftune_webui.plans.plan_panel import plan_panel
from halftune_webui.recipes.recipe import examine
from halftune_webui.settings import LANGUAGES, Settings

LANGUAGE = next(language for language in LANGUAGES if language != FALLBACK)
ROOT = Path(__file__).resolve().parents[2]
SOURCE, ROOMS = ROOT / "src" / "halftune", ("precision", "attention", "plan", "hardware", "config", "core")
BESIDE = ("data", "doctor", "evaluate", "export", "verify", "cli")  # whose findings the other tabs show
CAUSES = SOURCE / "verify" / "causes.yaml"
WEBUI = ROOT / "webui" / "halftune_webui"
GATE = ROOT / "kernels" / "halftune_kernels" / "gate.py"
BEFORE_START = (SOURCE / "data" / "order" / "split.py", ROOT / "webui" / "halftune_webui" / "runs" / "start_stop.py")
BUILTIN = ("qwen2-tiny", "qwen3_5-tiny", "kimi_linear-tiny", "mamba2-tiny", "rwkv7-tiny")
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"torch_dtype": "float16"},
    {"torch_dtype": "float32"},
    {"attention_dropout": 0.1},
    {"head_dim": 192},
    {"head_dim": 300},
    {"head_dim": 36},
    {"head_dim": 256, "attention_dropout": 0.1},
    {"model_type": "gemma2", "attn_logit_softcapping": 50.0},
    {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "attention_dropout": 0.1},
    {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "gpt2"},
    {"model_type": "bloom"},
    {"model_type": "falcon"},
    {"model_type": "deepseek_v3", "index_topk": 8},
    {"model_type": "newborn", "rope_theta": None},
    {"model_type": "minimax", "layer_types": ["linear_attention", "full_attention"] * 12},
    {"attention_chunk_size": 64},
    {"quantization_config": {"quant_method": "fp8"}},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    {"quantization_config": {"quant_method": "aqlm"}},
)
ASKED: tuple[dict[str, Any], ...] = (
    {"adapter": "none"},
    {"adapter": {"type": "lora", "use_dora": True, "modules_to_save": ["lm_head"]}},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"precision": "fp32", "adapter": "none"},
    {"precision": {"compute": "bf16", "on_unsupported": "fallback"}},
    {"precision": {"compute": "fp16", "trainable": "bf16"}},
    {"precision": {"compute": "fp32", "trainable": "bf16"}},
    {"precision": {"compute": "bf16", "trainable": "bf16", "optimizer_state": "bf16"}},
    {"precision": {"linear": "fp8"}},
    {"precision": {"linear": "fp8", "on_unsupported": "fallback"}},
    {"precision": {"linear": "fp8", "compute": "fp16"}},
    {"precision": {"linear": "fp8"}, "adapter": "none"},
    {"precision": {"linear": "fp8"}, "adapter": {"type": "lora", "use_dora": True}},
    {"precision": {"tf32": True}},
    {"precision": {"optimizer_state": "bf16"}, "training": {"optim": "sgd"}},
    {"precision": {"trainable": "fp32", "optimizer_state": "fp32"}},
    {"adapter": "none", "training": {"optim": "muon"}},
    {"adapter": {"type": "lora", "init": "pissa", "name_or_path": "a/b"}},
    {"adapter": {"type": "lora", "target_parameters": ["experts.down_proj"]}},
    {"adapter": {"type": "lora", "target_parameters": ["experts.down_proj"], "target_modules": [], "dropout": 0.1}},
    {"model": {"quantization": "nf4", "quantize_experts": True}},
    {"model": {"quantize_experts": True}},
    {"adapter": "oft"},
    {"adapter": "ia3"},
    {"adapter": "vera", "model": {"quantization": "int8"}},
    {"adapter": "lokr"},
    {"adapter": {"type": "none", "train_only": ["norm"], "train_layers": 2}},
    {"adapter": {"type": "none", "train_only": ["lm_hat"]}},
    {"adapter": {"type": "none", "train_layers": 99}},
    {"adapter": {"type": "lora", "lora_plus_ratio": 16}, "training": {"optim": "paged_adamw_8bit"}},
    {"adapter": "none", "training": {"optim": "paged_adamw", "per_device_train_batch_size": 48}},
    {"precision": {"optimizer_state": "bf16"}, "training": {"optim": "lion"}},
    {"model": {"quantization": "nf4"}},
    {"model": {"quantization": "int8"}, "adapter": "none"},
    {"attention": "fa2", "precision": "fp32"},
    {"attention": "fa2"},
    {"attention": "fa3"},
    {"attention": "flex", "data": {"packing": True}},
    {"attention": "sdpa", "data": {"packing": True}},
    {"attention": {"linear": "fla"}},
    {"attention": {"linear": "torch"}, "data": {"packing": True}},
    {"attention": {"linear": "halftune"}},
    {"data": {"packing": False, "group_by_length": False}, "training": {"fused_layers": True}},
    {"training": {"fused_layers": False, "gradient_checkpointing": True}},
    {"training": {"torch_compile": True, "gradient_checkpointing": False}},
    {"training": {"per_device_train_batch_size": 64}, "data": {"max_length": 40000}},
    {"training": {"tokens_per_batch": 2_000_000}, "data": {"max_length": 40000}, "adapter": "none"},
    {"adapter": {"type": "lora", "target_modules": ["q_prj"]}},
    {"method": "pretrain"},
    {"method": "dpo"},
    {"method": "reward"},
    {"method": "kto"},
    {"method": "dpo", "adapter": "none"},
    {"method": {"type": "dpo", "reference": "adapter_off"}, "adapter": "none"},
    {"method": {"type": "dpo", "reference": "precomputed"}},
    {"method": "dpo", "adapter": {"type": "lora", "name_or_path": "a"}},
    {"method": {"type": "dpo", "reference": "adapter_off"}, "adapter": {"type": "lora", "name_or_path": "a"}},
    {"adapter": {"type": "lora", "target_modules": "q_proj"}},
    {"adapter": {"type": "lora", "modules_to_save": ["lm_hat"]}},
)
SAID_OF_RECIPES = (
    "a: 1\nmodel: {revision: x}\ntraining: {seed: 1}\n",
    "model: 3\ndata: {train: [], eval: 3}\ntraining: {output_dir: }\n",
    "model: {name_or_path: builtin:qwen2-tiny, chat_template_kwargs: 3}\n"
    "data: {train: builtin:python-docs, max_length: 12.5, packing: maybe}\n"
    "adapter: {type: lorra}\nprecision: bf17\nattention: fa9\n"
    "training: {output_dir: r, learning_rate: fast, batch: 3, seed: no, save_steps: [1], warmup_ratio: 2, "
    "adam_beta1: 7, optim: adm, load_best: 7, eval_split: 1}\n"
    "generation: {temperature: -1, top_p: 3}\n",
)


def config(**asked: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"name_or_path": "x"},
        "data": {"train": ["d.jsonl"]},
        "training": {"output_dir": "r"},
    }
    for name, value in asked.items():
        base[name] = {**base[name], **value} if name in base else value
    return RunConfig.model_validate(base)


def models() -> Iterator[ModelFacts]:
    for kind in KINDS:
        yield facts_from_config({**QWEN2_5_0_5B, **kind}, "x")
    yield replace(facts_from_config(QWEN2_5_0_5B, "x"), stored={"a.weight": "bf16", "b.weight": "fp32"})
    yield replace(facts_from_config(QWEN2_5_0_5B, "x"), prediction_heads=("mtp.norm.weight",))
    for name in BUILTIN:
        yield read_model_facts(config(model={"name_or_path": f"builtin:{name}"}).model)


def machines() -> Iterator[Hardware]:
    """Those of the catalogue, with packages that they might have, and some of two kinds at once."""
    yield from CATALOGUE.values()
    fast, old = lookup("h100"), lookup("t4")
    flash = tuple((name, "9.9") for name in ("flash-attn", "flash-attn-3", "flash-attn-4", "flash-linear-attention"))
    for machine in (fast, lookup("a100"), lookup("rtx4090"), old, lookup("cpu")):
        yield replace(machine, packages=(*machine.packages, *flash))
    yield replace(fast, devices=tuple(replace(device, capability=(13, 0)) for device in fast.devices))
    yield replace(fast, devices=(*fast.devices, *old.devices))
    yield replace(old, packages=(("torch", "2.13.0"),))
    yield replace(old, devices=tuple(replace(one, name="Tesla P40", capability=(6, 1)) for one in old.devices))
    weak = [replace(device, arch="gfx1030", name="AMD Radeon") for device in lookup("mi250").devices]
    yield replace(lookup("mi250"), devices=(*weak, *lookup("mi300x").devices))
    yield replace(fast, packages=(("torch", "2.11.0"), ("triton", "3.6.0"), *flash))
    yield replace(fast, packages=(("torch", "2.11.0"), ("triton", "2.1.0")))
    yield replace(fast, packages=(("torch", "2.13.0"), *flash))


def reasons(plan: Plan) -> Iterator[str]:
    """Everything that the web UI shows of a plan."""
    for part in (plan.weights, plan.precision, plan.attention, plan.batch, plan.memory, plan.method, plan):
        yield from (value.reason for value in vars(part).values() if hasattr(value, "reason"))
    yield from (reason for _, reason in (*plan.attention.rejected, *plan.attention.rejected_linear))
    yield from (*plan.warnings, plan.machine)


def wishes() -> Iterator[tuple[Hardware, ModelFacts, dict[str, Any]]]:
    """All machines for some models, all models on some machines, whatever may be asked there."""
    every, here = list(models()), list(machines())
    few = [every[0], every[-1], next(facts for facts in every if facts.model_type == "minimax")]
    few.append(next(facts for facts in every if facts.model_type.startswith("qwen3_5")))
    some = [lookup(name) for name in ("p100", "t4", "a100", "b200", "mi300x", "m2-macos13", "cpu")]
    simple = ({}, {"precision": "bf16"}, {"precision": "fp16"}, {"attention": {"linear": "fla"}})
    for machine, asked in product(here, simple):
        yield from ((machine, facts, asked) for facts in (few[:1] if "precision" in asked else few))
    for machine, asked in product(some, ASKED):
        yield from ((machine, facts, asked) for facts in (few if "attention" in asked else few[:1]))
    asked_of_all = ({}, {"attention": "sdpa", "data": {"packing": True}}, {"precision": "fp16"}, {"adapter": "none"})
    flash = next(one for one in here if one.version("flash-attn") and one.devices[0].capability == (8, 9))
    yield from product((*some[1:3], flash), every, asked_of_all)
    yield from product(some[3:4], every, asked_of_all[-1:])  # experts in one kernel


@pytest.fixture(scope="module", autouse=True)
def _architectures_built_here() -> Iterator[None]:
    """What the user's cache does not hold is built in this process, not in one for each model that imports torch."""
    built = architecture._built

    def here(raw: dict[str, Any], multimodal: bool) -> dict[str, Any]:
        importlib.import_module("torch")
        importlib.import_module("transformers")
        return built(raw, multimodal)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "_built", here)
        yield


@cache
def said() -> frozenset[str]:
    """What plans say of all that, and what is said of wrong recipes."""
    found: set[str] = set()
    for machine, facts, asked in wishes():
        try:
            found.update(reasons(resolve(config(**asked), machine, facts)))
        except PlanError as error:
            found.update(text for one in error.problems for text in (one.what, one.remedy) if text)
    here = Settings((Path.cwd().resolve(),), Path("runs"))
    for recipe in SAID_OF_RECIPES:
        found.update(text for one in examine(recipe, here).problems for text in (one.what, one.remedy) if text)
    return frozenset(found)


def table() -> Phrases:
    return load_words(LANGUAGE).said


def test_every_sentence_is_known() -> None:
    """No two English words in a row are left, but in names."""
    names = {"Hugging Face", *(device.name for machine in machines() for device in machine.devices)}
    left = {}
    for text in said():
        told = table()(text)
        for name in sorted(names, key=len, reverse=True):
            told = told.replace(name, "")
        if re.search(r"[A-Za-z]{2,} [a-z]{2,}\b", told):
            left[text] = told
    assert not left, "labels/reasons.*.yaml have no sentence for these (text: as told)"


def test_no_sentence_is_taken_for_one_that_stands_before_it() -> None:
    said, filled = table(), {key: re.sub(r"\{[a-z]+\}", "x1", english) for key, english in table().english.items()}
    wanted = {key: re.sub(r"\{[a-z]+\}", "x1", theirs) for key, theirs in said.table.items()}
    assert [key for key, text in filled.items() if said(text) != wanted[key]] == []


def test_no_sentence_is_left_of_what_is_not_said_any_more() -> None:
    """What was not said above stands in the program: its own words between the pieces do, all of them."""
    beside = strings([*WEBUI.rglob("*.py"), *(file for room in BESIDE for file in (SOURCE / room).rglob("*.py"))])
    causes = yaml.safe_load(CAUSES.read_text(encoding="utf-8"))["causes"]
    beside += "\n".join(text for one in causes for text in one.values())
    program = strings([GATE, *BEFORE_START, *(file for room in ROOMS for file in (SOURCE / room).rglob("*.py"))])
    used = {key for text in said() for key in sentences(text)}
    rest = [english for key, english in table().english.items() if key not in used]
    rest = [english for english in rest if not all(part in beside for part in words_of(english))]
    assert len(rest) < len(used) / 4
    assert [english for english in rest if not all(part in program for part in words_of(english))] == []


def strings(files: list[Path]) -> str:
    """Every text in the sources."""
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def sentences(text: str) -> Iterator[str]:
    """The key of the sentence that makes a text, and those of its pieces."""
    if (found := table().match(text)) is not None:
        yield found[0]
        for piece in found[1].values():
            yield from sentences(piece)


def words_of(english: str) -> list[str]:
    return [part for part in re.split(r"\{[a-z]+\}", english) if len(part) > 12]


def test_keys_and_pieces_are_the_same_in_both_languages() -> None:
    assert table().english.keys() == table().table.keys()
    for key, other in table().table.items():
        assert sorted(re.findall(r"\{[a-z]+\}", table().english[key])) == sorted(re.findall(r"\{[a-z]+\}", other)), key


def test_a_reworded_sentence_needs_no_new_translation() -> None:
    theirs = {"compute.slow": "{device} 很慢"}
    for english in ("{device} is slow", "slow: {device}"):
        assert Phrases({"compute.slow": english}, theirs)(english.format(device="x")) == "x 很慢"


def test_pieces_are_translated_in_turn_and_stay_where_they_are_not_known() -> None:
    english = {"both": "{first}; {rest}", "beats": "{a} beats {b}", "one": "one"}
    phrases = Phrases(english, {"both": "{first}；{rest}", "beats": "{b} < {a}", "one": "eins"})
    assert phrases("one beats two; one; 3 beats one") == "two < eins；eins；eins < 3"
    assert phrases("nothing of this") == "nothing of this"


def test_english_stays_as_it_is() -> None:
    words = load_words(FALLBACK)
    assert all(words.said(text) == text for text in said())


def test_every_error_code_is_told_in_the_language_whatever_its_sentence() -> None:
    words = load_words(LANGUAGE)
    assert words.codes.keys() == catalogue().keys()
    for code in words.codes:
        told = words.problem(HalftuneError("a sentence that nobody has translated", code=code))
        assert told.startswith(words.codes[code])
    assert load_words(FALLBACK).problem(HalftuneError("a", code="data.empty")) == "a [data.empty]"


def test_a_plan_is_told_in_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = resolve(config(), lookup("t4"), next(models()))
    panel = plan_panel(plan, None, load_words("zh"), elsewhere=True)
    assert "Tesla T4 (计算能力 7.5) 有 fp16 张量核心，没有 bf16 单元" in panel
    assert "16 核，128 GiB 主内存" in panel
