"""The truth table: every kind of device × every request, with the reason's text as part of the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from halftune.config.facts.model import ModelFacts, facts_from_config
from halftune.config.sections.model import LoraAdapter, NoAdapter, OftAdapter, PrecisionSection
from halftune.core.errors import PlanError
from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune.precision import PrecisionPlan
from halftune.precision.resolve import resolve_precision
from halftune.precision.truth_table import TRUTH_TABLE, row_of

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "rope_theta": 1e4,
}
LORA, FULL = LoraAdapter(), NoAdapter(type="none")


def facts(model_type: str = "llama", dtype: str = "bfloat16", **extra: Any) -> ModelFacts:
    return facts_from_config({**LLAMA, "model_type": model_type, "dtype": dtype, **extra}, "here")


def plan(machine: str, adapter: Any = LORA, model: ModelFacts | None = None, **request: Any) -> PrecisionPlan:
    return resolve_precision(PrecisionSection(**request), lookup(machine), model or facts(), adapter)


NO_BF16 = "{} has no bf16 units (require 8.0): torch would emulate bf16 slowly"
CPU_FP16 = "{} is a CPU: fp16 is slow there, and accelerate would silently use fp32"
T4, V100, P100 = (
    f"{n} (compute capability {c})" for n, c in (("Tesla T4", 7.5), ("Tesla V100", "7.0"), ("Tesla P100", "6.0"))
)
GTX = "GeForce GTX 1660 Ti (compute capability 7.5)"
SLOW, TWICE = {"p100": P100, "gtx1660": GTX}, "does fp16 at up to twice the rate of fp32, without tensor cores"
ARM, MI100 = "ARM CPU (Neoverse V1)", "AMD Instinct MI100 (gfx908)"
AMPERE = {
    "rtx3090": "GeForce RTX 3090 (compute capability 8.6)",
    "rtx4090": "GeForce RTX 4090 (compute capability 8.9)",
    "rtx5090": "GeForce RTX 5090 (compute capability 12.0)",
    "l4": "NVIDIA L4 (compute capability 8.9)",
    "a10": "NVIDIA A10 (compute capability 8.6)",
    "a100": "NVIDIA A100 80GB (compute capability 8.0)",
    "a100-40": "NVIDIA A100 40GB (compute capability 8.0)",
    "h100": "NVIDIA H100 (compute capability 9.0)",
    "h200": "NVIDIA H200 (compute capability 9.0)",
    "b200": "NVIDIA B200 (compute capability 10.0)",
}
OTHERS = {
    "mi250": ("AMD Instinct MI250 (one die) (gfx90a)", "has bf16 matrix cores"),
    "mi300x": ("AMD Instinct MI300X (gfx942)", "has bf16 matrix cores"),
    "mi355x": ("AMD Instinct MI355X (gfx950)", "has bf16 matrix cores"),
    "rx7900xtx": ("AMD Radeon RX 7900 XTX (gfx1100)", "has bf16 matrix instructions"),
    "max1550": ("Intel Data Center GPU Max 1550", "has bf16 matrix engines"),
    "m2": ("Apple M2", "supports bf16 since macOS 14"),
}

NO_UNITS = "has fp16 tensor cores and no bf16 units (require 8.0)"
ZEN = "AMD CPU (Zen 4) is an AMD CPU with AVX512-BF16"
AVX = "CPU with AVX512-BF16 has AVX512-BF16 and no AMX: bf16 measures 1.9 times slower than fp32"
MASTERS, MOMENTS = {"compute": "bf16", "trainable": "bf16"}, {"compute": "bf16", "optimizer_state": "bf16"}

# (machine, request) → (compute, reason)
TAKEN: list[tuple[str, str, str, str]] = [
    *[(m, "auto", "bf16", f"{n} has bf16 tensor cores") for m, n in AMPERE.items()],
    *[(m, "auto", "bf16", f"{n} {why}") for m, (n, why) in OTHERS.items()],
    *[(m, "bf16", "bf16", f"{n} does bf16 at full speed; asked for") for m, n in AMPERE.items()],
    *[(m, "fp16", "fp16", f"{n} does fp16 at full speed; asked for") for m, n in AMPERE.items()],
    *[(m, "bf16", "bf16", f"{n} does bf16 at full speed; asked for") for m, (n, _) in OTHERS.items()],
    *[(m, "fp16", "fp16", f"{n} does fp16 at full speed; asked for") for m, (n, _) in OTHERS.items()],
    *[(m, "fp32", "fp32", "asked for; every device does fp32") for m in CATALOGUE],
    ("t4", "auto", "fp16", f"{T4} {NO_UNITS}"),
    ("v100", "auto", "fp16", f"{V100} {NO_UNITS}"),
    ("rtx2080", "auto", "fp16", f"GeForce RTX 2080 (compute capability 7.5) {NO_UNITS}"),
    ("t4", "fp16", "fp16", f"{T4} does fp16 at full speed; asked for"),
    ("v100", "fp16", "fp16", f"{V100} does fp16 at full speed; asked for"),
    *[(m, "auto", "fp32", f"{n} has no tensor cores") for m, n in SLOW.items()],
    *[(m, "fp16", "fp16", f"{n} {TWICE}; asked for") for m, n in SLOW.items()],
    ("mi100", "auto", "bf16", f"{MI100} has bf16 matrix cores, at half the rate of fp16"),
    ("mi100", "bf16", "bf16", f"{MI100} does bf16 at half the rate of fp16, and faster than fp32; asked for"),
    ("mi100", "fp16", "fp16", f"{MI100} does fp16 at full speed; asked for"),
    ("cpu-arm-bf16", "auto", "fp32", f"{ARM} has bf16 units, and training in bf16 was not measured on ARM"),
    ("cpu-arm-bf16", "bf16", "bf16", f"{ARM} has bf16 units; asked for"),
    ("m2-macos13", "auto", "fp16", "Apple M2 on macOS 13 has no bf16 before macOS 14"),
    ("m2-macos13", "fp16", "fp16", "Apple M2 on macOS 13 does fp16 at full speed; asked for"),
    ("cpu-amx", "auto", "bf16", "CPU with AMX has AMX bf16 tiles"),
    ("cpu-amx", "bf16", "bf16", "CPU with AMX does bf16 at full speed; asked for"),
    ("cpu-avx512bf16", "auto", "fp32", f"{AVX} there"),
    ("cpu-zen4", "auto", "bf16", f"{ZEN}: training in bf16 was measured 1.5 to 2 times faster than fp32"),
    ("cpu-zen4", "bf16", "bf16", f"{ZEN}, which does bf16 faster than fp32; asked for"),
    ("cpu-avx512bf16", "bf16", "bf16", f"{AVX}; asked for"),
    ("cpu", "auto", "fp32", "CPU without bf16 units has no bf16 units"),
    ("cpu", "bf16", "bf16", "CPU without bf16 units has no bf16 units: bf16 is emulated slowly; asked for"),
    ("cpu-arm", "auto", "fp32", "ARM CPU has no bf16 units"),
]  # fmt: skip
REFUSED: list[tuple[str, str, str]] = [
    ("t4", "bf16", NO_BF16.format(T4)),
    ("v100", "bf16", NO_BF16.format(V100)),
    ("v100-32", "bf16", NO_BF16.format("Tesla V100 32GB (compute capability 7.0)")),
    ("rtx2080", "bf16", NO_BF16.format("GeForce RTX 2080 (compute capability 7.5)")),
    ("p100", "bf16", NO_BF16.format(P100)),
    ("gtx1660", "bf16", NO_BF16.format(GTX)),
    ("cpu-arm-bf16", "fp16", CPU_FP16.format(ARM)),
    ("m2-macos13", "bf16", "Apple M2 on macOS 13 has no bf16 before macOS 14"),
    ("cpu-amx", "fp16", CPU_FP16.format("CPU with AMX")),
    ("cpu-avx512bf16", "fp16", CPU_FP16.format("CPU with AVX512-BF16")),
    ("cpu-zen4", "fp16", CPU_FP16.format("AMD CPU (Zen 4)")),
    ("cpu", "fp16", CPU_FP16.format("CPU without bf16 units")),
]
FALLS_TO = {"t4": "fp16", "v100": "fp16", "v100-32": "fp16", "rtx2080": "fp16", "p100": "fp32", "gtx1660": "fp32"}
FALLS_TO |= {"m2-macos13": "fp16", "cpu-amx": "bf16", "cpu-avx512bf16": "fp32", "cpu-zen4": "bf16", "cpu": "fp32"}
FALLS_TO |= {"cpu-arm-bf16": "fp32"}


@pytest.mark.parametrize(("machine", "asked", "compute", "reason"), TAKEN)
def test_what_is_taken_and_why(machine: str, asked: str, compute: str, reason: str) -> None:
    made = plan(machine, compute=asked)
    assert (made.compute.value, made.compute.reason) == (compute, reason)
    assert made.grad_scaler.value is (compute == "fp16")
    assert made.trainable.value == "fp32"
    assert made.storage.value == compute


@pytest.mark.parametrize(("machine", "asked", "reason"), REFUSED)
def test_what_is_refused_and_why(machine: str, asked: str, reason: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(machine, compute=asked)
    assert caught.value.what == f"{asked} is unavailable: {reason}"
    assert caught.value.exit_code == 2
    assert "precision: fp32" in caught.value.remedy or "auto (fp32 here)" in caught.value.remedy
    assert f"{{compute: {asked}, on_unsupported: fallback}}" in caught.value.remedy


@pytest.mark.parametrize(("machine", "asked", "reason"), REFUSED)
def test_a_fallback_says_so(machine: str, asked: str, reason: str) -> None:
    made = plan(machine, compute=asked, on_unsupported="fallback")
    assert made.compute.value == FALLS_TO[machine]
    assert made.compute.reason.startswith(f"{asked} was asked for, but {reason}; fell back to {FALLS_TO[machine]}")
    assert any("was asked for, but" in warning for warning in made.warnings)


def test_every_machine_is_in_the_table_and_every_cell_is_tested() -> None:
    said = {(machine, asked) for machine, asked, *_ in TAKEN} | {(machine, asked) for machine, asked, _ in REFUSED}
    missing = {(m, a) for m in CATALOGUE for a in ("auto", "bf16", "fp16", "fp32")} - said
    same_row = {
        (m, a)
        for m, a in missing
        if any(row_of(lookup(m).devices[0]) is row_of(lookup(o).devices[0]) for o, b in said if a == b)
    }
    assert missing == same_row
    assert {row.name for row in TRUTH_TABLE} - {row_of(hw.devices[0]).name for hw in CATALOGUE.values()} == {
        "ROCm, other targets",
        "CUDA, compute capability below 7.0",
    }


FP8 = {"h200": "yes", "rtx4090": "yes", "a100": "no", "t4": "no", "mi300x": "no", "cpu": "no", "m2-macos13": "no"}


@pytest.mark.parametrize("machine", FP8)
def test_float8_is_for_devices_that_multiply_it(machine: str) -> None:
    """And is refused with the device's reason elsewhere, or falls back."""
    asked = {"linear": "fp8", "on_unsupported": "fallback"}
    made = plan(machine, **asked)
    assert (made.linear is not None and made.linear.value == "fp8") is (FP8[machine] == "yes")
    assert any("fp8" in warning.lower() for warning in made.warnings) is (FP8[machine] == "no")
    if FP8[machine] == "yes":
        return
    with pytest.raises(PlanError) as caught:
        plan(machine, linear="fp8")
    assert (caught.value.where, caught.value.code) == ("precision.linear", "precision.compute_unavailable")


def test_float8_of_full_fine_tuning_is_torchaos() -> None:
    made = plan("h200", FULL, linear="fp8")
    assert made.trains_in_float8
    assert (made.storage.value, made.trainable.value, made.saved.value) == ("fp32", "fp32", "bf16")
    assert not plan("h200", LORA, linear="fp8").trains_in_float8
    assert not plan("a100", FULL, linear="fp8", on_unsupported="fallback").trains_in_float8


@pytest.mark.parametrize(
    ("machine", "adapter", "asked"),
    [
        ("h200", LoraAdapter(use_dora=True), {}),
        ("h200", LoraAdapter(init="pissa"), {}),
        ("h200", OftAdapter(type="oft"), {}),
        ("h200", LORA, {"compute": "fp16"}),
        ("h200", FULL, {"compute": "fp16"}),
        ("h200", FULL, {"compute": "fp32"}),
        ("a100", FULL, {}),
        ("mi300x", FULL, {}),
        ("cpu-amx", FULL, {}),
    ],
)
def test_where_float8_is_refused(machine: str, adapter: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        plan(machine, adapter, linear="fp8", **asked)
    assert (caught.value.where, caught.value.code) == ("precision.linear", "precision.compute_unavailable")


def test_float8_needs_a_layer_of_its_sizes() -> None:
    odd = facts(hidden_size=1000, intermediate_size=2000)
    with pytest.raises(PlanError) as caught:
        plan("h200", model=odd, linear="fp8")
    assert caught.value.code == "precision.compute_unavailable"
    assert plan("h200", model=facts(hidden_size=1008), linear="fp8").linear is not None


@pytest.mark.parametrize(
    ("name", "capability", "auto", "fp16"),
    [
        ("NVIDIA GeForce GTX 1650 SUPER", (7, 5), "fp32", True),
        ("NVIDIA GeForce MX550", (7, 5), "fp32", True),
        ("NVIDIA T1000 8GB", (7, 5), "fp32", True),
        ("Quadro T2000 with Max-Q Design", (7, 5), "fp32", True),
        ("Tesla T4", (7, 5), "fp16", True),
        ("Quadro RTX 4000", (7, 5), "fp16", True),
        ("NVIDIA T1000 8GB", (8, 6), "bf16", True),  # the name decides only among cards of 7.5
        ("Tesla P40", (6, 1), "fp32", False),
        ("NVIDIA GeForce GTX 1080", (6, 1), "fp32", False),
    ],
)
def test_tensor_cores_are_a_fact_of_the_chip(name: str, capability: tuple[int, int], auto: str, fp16: bool) -> None:
    machine = lookup("t4")
    machine = replace(machine, devices=(replace(machine.devices[0], name=name, capability=capability),))
    made = resolve_precision(PrecisionSection(), machine, facts(), LORA)
    assert made.compute.value == auto
    assert ("no tensor cores" in made.compute.reason) is (auto == "fp32")
    if fp16:
        assert resolve_precision(PrecisionSection(compute="fp16"), machine, facts(), LORA).grad_scaler.value
    else:
        with pytest.raises(PlanError, match="no fast fp16"):
            resolve_precision(PrecisionSection(compute="fp16"), machine, facts(), LORA)


def test_an_unlisted_rocm_target_computes_in_fp32_unless_asked() -> None:
    machine = lookup("mi300x")
    machine = replace(machine, devices=(replace(machine.devices[0], name="Radeon", arch="gfx1030"),))
    made = resolve_precision(PrecisionSection(), machine, facts(), LORA)
    assert made.compute.value == "fp32"
    asked = resolve_precision(PrecisionSection(compute="bf16"), machine, facts(), LORA)
    assert asked.compute.value == "bf16"
    assert "not among the targets" in asked.warnings[0]


@pytest.mark.parametrize(
    ("machine", "compute"), [("a100+t4", "fp16"), ("h100x2+v100", "fp16"), ("t4+p100", "fp32"), ("a100+h100", "bf16")]
)
def test_the_weakest_device_decides_and_is_named(machine: str, compute: str) -> None:
    made = plan(machine)
    assert made.compute.value == compute
    weak = {"a100+t4": "Tesla T4", "h100x2+v100": "Tesla V100", "t4+p100": "Tesla P100", "a100+h100": "NVIDIA A100"}
    assert made.compute.reason.startswith(weak[machine])
    assert "the weakest of" in made.compute.reason


def test_equal_devices_need_no_weakest() -> None:
    assert "weakest" not in plan("t4x4").compute.reason


def test_old_macos_trains_in_full_in_fp32_and_adapters_in_fp16() -> None:
    assert plan("m2-macos13", FULL).compute.value == "fp32"
    assert plan("m2-macos13", LORA).compute.value == "fp16"


# --- rules between fields: (request, adapter) → storage, trainable, compute, autocast, scaler, state, saved
FIELDS = [
    ("a100", {"compute": "bf16"}, LORA, ("bf16", "fp32", "bf16", True, False, "fp32", "fp32")),
    ("a100", MASTERS, LORA, ("bf16", "bf16", "bf16", False, False, "bf16", "bf16")),
    ("a100", {"compute": "bf16"}, FULL, ("fp32", "fp32", "bf16", True, False, "fp32", "bf16")),
    ("a100", MASTERS, FULL, ("bf16", "bf16", "bf16", False, False, "bf16", "bf16")),
    ("a100", {**MASTERS, "optimizer_state": "fp32"}, FULL, ("bf16", "bf16", "bf16", False, False, "fp32", "bf16")),
    ("a100", MOMENTS, FULL, ("fp32", "fp32", "bf16", True, False, "bf16", "bf16")),
    ("t4", {"compute": "fp16"}, LORA, ("fp16", "fp32", "fp16", True, True, "fp32", "fp32")),
    ("t4", {"compute": "fp16"}, FULL, ("fp32", "fp32", "fp16", True, True, "fp32", "fp16")),
    ("a100", {"compute": "fp32"}, LORA, ("fp32", "fp32", "fp32", False, False, "fp32", "fp32")),
    ("a100", {"compute": "fp32"}, FULL, ("fp32", "fp32", "fp32", False, False, "fp32", "fp32")),
]  # fmt: skip


def test_fp64_is_rounded_whatever_is_planned() -> None:
    made = plan("cpu", FULL, facts(dtype="float64"), compute="fp32")
    assert "the checkpoint's fp64 is rounded on load" in made.storage.reason


def test_what_is_said_of_routers_is_true_under_autocast() -> None:
    made = plan("a100", model=facts("mixtral", num_local_experts=4))
    assert "under autocast their matmul uses the compute dtype" in made.keep_fp32.reason


@pytest.mark.parametrize(("machine", "request_", "adapter", "expected"), FIELDS)
@pytest.mark.parametrize("checkpoint", ["float32", "float16", "bfloat16"])
def test_all_fields(machine: str, request_: dict, adapter: Any, expected: tuple, checkpoint: str) -> None:
    """The checkpoint's own dtype never changes the plan: only what is said about it."""
    made = plan(machine, adapter, facts(dtype=checkpoint), **request_)
    fields = (
        made.storage,
        made.trainable,
        made.compute,
        made.autocast,
        made.grad_scaler,
        made.optimizer_state,
        made.saved,
    )
    assert tuple(choice.value for choice in fields) == expected
    assert made.reduce.value == made.trainable.value


@pytest.mark.parametrize("adapter", [LORA, FULL])
@pytest.mark.parametrize(("compute", "why"), [("fp16", "loss scaler"), ("fp32", "lost the precision")])
def test_bf16_masters_go_with_bf16_compute_only(adapter: Any, compute: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        plan("a100", adapter, compute=compute, trainable="bf16")


def test_pinned_bf16_masters_warn() -> None:
    warnings = plan("a100", FULL, compute="bf16", trainable="bf16").warnings
    assert [w for w in warnings if "updates smaller than 1/256" in w]
    assert [w for w in warnings if "moments in bf16" in w]
    assert not plan("a100", FULL, compute="bf16").warnings


@pytest.mark.parametrize(
    ("checkpoint", "compute", "storage_says", "warns"),
    [
        ("float16", "bf16", "the checkpoint's fp16 is rounded", "drops 3 of its 10 mantissa bits"),
        ("bfloat16", "fp16", "the checkpoint's bf16 is rounded", "The checkpoint is bf16"),
        ("float32", "fp16", "the checkpoint's fp32 is rounded", "The checkpoint is fp32"),
        ("float32", "bf16", "the checkpoint's fp32 is rounded", ""),
        ("bfloat16", "fp32", "the checkpoint's bf16 is widened without loss", ""),
        ("bfloat16", "bf16", "", ""),
    ],
)
def test_the_checkpoints_own_dtype_has_a_say(checkpoint: str, compute: str, storage_says: str, warns: str) -> None:
    made = plan("a100", model=facts(dtype=checkpoint), compute=compute)
    assert storage_says in made.storage.reason
    assert ("the checkpoint" in made.storage.reason) is bool(storage_says)
    assert [w for w in made.warnings if warns in w] if warns else not made.warnings


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_families_that_overflow_get_fp16_only_if_asked_for(family: str) -> None:
    assert plan("t4", model=facts(family)).compute.value == "fp32"
    assert plan("t4", model=facts(family), compute="bf16", on_unsupported="fallback").compute.value == "fp32"
    with pytest.raises(PlanError, match=r"auto \(fp32 here\)"):
        plan("t4", model=facts(family), compute="bf16")
    asked = plan("t4", model=facts(family), compute="fp16")
    assert asked.compute.value == "fp16"
    assert "known to overflow in fp16" in asked.warnings[0]
    assert not plan("a100", model=facts(family)).warnings
    assert not plan("t4", model=facts(family)).warnings
    assert not plan("t4", model=facts(family), compute="fp32").warnings


def test_what_stays_fp32() -> None:
    linear = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    hybrid = plan("a100", model=facts("qwen3_5_text", **linear), compute="bf16", trainable="bf16")
    assert r"(^|\.)A_log$" in hybrid.keep_fp32.value
    assert r"(^|\.)dt_bias$" in hybrid.keep_fp32.value
    assert hybrid.autocast.value, "fp32 weights that meet bf16 activations need autocast"
    assert r"(^|\.)(gate|router)\.(weight|bias)$" in plan("a100", model=facts("mixtral")).keep_fp32.value
    assert plan("a100").keep_fp32.value == ()


def test_tf32() -> None:
    assert plan("a100").tf32.value is True
    assert plan("a100", compute="fp32").tf32.value is False
    assert plan("a100", compute="fp32", tf32=True).tf32.value is True
    assert plan("a100", tf32=False).tf32.value is False
    assert plan("t4").tf32.value is False
    asked = plan("t4", tf32=True)
    assert asked.tf32.value is False
    assert "no effect" in asked.warnings[-1]


def test_quantised_weights_are_not_trained() -> None:
    quantised = facts(quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(PlanError, match="quantised"):
        plan("a100", FULL, quantised)
    assert "stay quantised" in plan("a100", LORA, quantised).storage.reason


MIXED = {
    "model.layers.0.a.weight": "bf16",
    "model.layers.1.a.weight": "fp16",
    "model.norm.weight": "fp32",
    "x.A_log": "fp32",
}


@pytest.mark.parametrize(
    ("compute", "adapter", "rounded", "wide"),
    [
        ("bf16", LORA, {"fp16": "model.layers.1.a.weight", "fp32": "model.norm.weight"}, ""),
        ("fp16", LORA, {"bf16": "model.layers.0.a.weight", "fp32": "model.norm.weight"}, "bf16 and fp32"),
        ("fp16", FULL, {}, "bf16 and fp32"),
        ("fp32", LORA, {}, ""),
        ("bf16", FULL, {}, ""),
    ],
)
def test_a_checkpoint_in_several_formats_is_not_rounded_in_silence(
    compute: str, adapter: Any, rounded: dict[str, str], wide: str
) -> None:
    mixed = replace(facts(), stored=MIXED, linear_layers=1)  # which keeps A_log in fp32
    made = plan("a100", adapter, mixed, compute=compute)
    for source, first in rounded.items():
        (said,) = [warning for warning in made.warnings if f"tensors are {source} in the checkpoint" in warning]
        assert said.startswith("1 of 4 ")
        assert said.endswith(f"rounded to {compute} on load, first {first}.")
        assert said.removesuffix(".") in made.storage.reason
    assert ("no tensor is rounded" in made.storage.reason) is (not rounded)
    assert [w for w in made.warnings if "on load, first" in w] == [] or rounded
    assert any("compute is fp16" in warning for warning in made.warnings) is bool(wide)


def test_headers_tell_the_format_of_every_tensor() -> None:
    headers = {
        "a.weight": ("BF16", (64, 64)),
        "norm.weight": ("F32", (64,)),
        "visual.b": ("F16", (2,)),
        "n": ("I64", ()),
    }
    found = facts_from_config({**LLAMA, "dtype": "float16"}, "here", headers=headers)
    assert (found.dtype, found.stored) == ("bf16", {"a.weight": "bf16", "norm.weight": "fp32"})
