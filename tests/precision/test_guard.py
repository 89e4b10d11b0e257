"""The guard keeps the plan's number format at attention calls: what is cast, what is refused, what is left alone."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from halftune.core.errors import DtypeContractError
from halftune.precision.guard import Guard

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Layer(nn.Module):
    layer_idx = 3


class Recorder:
    """An attention callable that keeps what it was given and returns the query."""

    def __init__(self) -> None:
        self.got: list[torch.Tensor] = []

    def __call__(
        self,
        module: nn.Module | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        self.got = [query, key, value]
        return query * 1, None


def operands(*dtypes: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 4, 8, dtype=dtype) for dtype in dtypes]


def wrapped(guard: Guard) -> tuple[Recorder, Any]:
    recorder = Recorder()
    return recorder, guard.attention(recorder.__call__)


CASES = [
    # plan, autocast, q, k, v → computed in, output
    ("bf16", None, (BF16, BF16, BF16), BF16, BF16),
    ("bf16", None, (F16, F16, F16), F16, F16),  # fp16 stays fp16
    ("fp32", None, (F32, F32, F32), F32, F32),  # an all-fp32 plan stays fp32
    ("bf16", None, (F32, F32, F32), BF16, F32),  # fp32 weights outside autocast: the layers around are fp32
    ("bf16", None, (F32, F32, BF16), BF16, BF16),  # fp32 norms on q and k; the weights are bf16
    ("bf16", None, (BF16, F32, BF16), BF16, BF16),  # all operands count, not q alone
    ("bf16", None, (BF16, BF16, F32), BF16, BF16),
    ("bf16", None, (F32, F16, F32), F16, F16),  # the single half dtype, not the plan's
    ("fp32", None, (F32, F32, F16), F16, F16),
    ("bf16", BF16, (F32, F32, BF16), BF16, BF16),
    ("bf16", BF16, (F32, F32, F32), BF16, BF16),  # under autocast the next layer casts for itself
    ("bf16", F16, (F32, BF16, F16), F16, F16),  # autocast settles what two half dtypes contradict
    ("fp32", None, (torch.float64, F32, F32), F32, F32),
]


@pytest.mark.parametrize(("plan", "autocast", "arrive", "computed", "returned"), CASES)
def test_which_dtype(plan: Any, autocast: torch.dtype | None, arrive: Any, computed: Any, returned: Any) -> None:
    guard = Guard("cast", plan)
    recorder, attend = wrapped(guard)
    with torch.autocast("cpu", dtype=autocast or BF16, enabled=autocast is not None):
        out, weights = attend(Layer(), *operands(*arrive))
    assert [tensor.dtype for tensor in recorder.got] == [computed] * 3
    assert out.dtype == returned
    assert weights is None
    assert guard.report()["casts"] == (0 if set(arrive) == {computed} else 1)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_legal_call_passes_the_very_same_tensors(dtype: torch.dtype) -> None:
    recorder, attend = wrapped(Guard("cast", "bf16"))
    given = operands(dtype, dtype, dtype)
    given[1] = given[1].transpose(1, 2)  # the guard is about dtypes; layout is the backend's business
    attend(Layer(), *given)
    assert all(mine is theirs for mine, theirs in zip(given, recorder.got, strict=True))


@pytest.mark.parametrize("mode", ["cast", "strict"])
def test_two_half_formats_without_autocast_are_an_error(mode: Any) -> None:
    _, attend = wrapped(Guard(mode, "bf16"))
    with pytest.raises(DtypeContractError, match="two half formats: query bf16, key fp16, value bf16") as caught:
        attend(Layer(), *operands(BF16, F16, BF16))
    assert caught.value.where == "Layer of layer 3"


def test_strict_raises_with_the_facts_and_casts_nothing() -> None:
    guard = Guard("strict", "bf16")
    _, attend = wrapped(guard)
    attend(Layer(), *operands(BF16, BF16, BF16))
    with pytest.raises(DtypeContractError) as caught:
        attend(Layer(), *operands(F32, F32, BF16))
    message = str(caught.value)
    for fact in ("query fp32, key fp32, value bf16", "computes in bf16", "Layer of layer 3", "attention.guard: cast"):
        assert fact in message
    assert guard.report() == {"mode": "strict", "compute": "bf16", "casts": 0, "sites": []}


def test_off_is_the_callable_itself() -> None:
    recorder = Recorder()
    assert Guard("off", "bf16").attention(recorder) is recorder


def test_each_site_is_logged_once_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"first": nn.ModuleDict({"attention": Layer()}), "second": Layer()})
    guard = Guard("cast", "bf16")
    guard.watch(model)
    _, attend = wrapped(guard)
    with caplog.at_level(logging.DEBUG, logger="halftune.precision.guard"):
        for _ in range(3):
            attend(model["first"]["attention"], *operands(F32, F32, BF16))
        attend(model["second"], *operands(F32, F32, BF16))
        attend(model["second"], *operands(BF16, BF16, BF16))
        assert not caplog.records, "they wait for a forward pass, which tells the line"
        guard.report()
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "first.attention: attention got query fp32, key fp32, value bf16; cast to bf16"),
        ("DEBUG", "second: attention got query fp32, key fp32, value bf16; cast to bf16"),
    ]
    what = {"arrived": "query fp32, key fp32, value bf16", "cast_to": "bf16", "promoted": ""}
    assert guard.report() == {
        "mode": "cast",
        "compute": "bf16",
        "casts": 4,
        "sites": [
            {"site": "first.attention", "casts": 3, **what},
            {"site": "second", "casts": 1, **what},
        ],
    }


def test_gradients_return_in_the_leafs_dtype() -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query * key * value

    q, k, v = (tensor.requires_grad_() for tensor in operands(F32, F32, BF16))
    out = Guard("cast", "bf16").attention(attend)(q, k, v)
    assert out.dtype == BF16
    out.float().sum().backward()
    assert [tensor.grad.dtype for tensor in (q, k, v)] == [F32, F32, BF16]
    torch.testing.assert_close(q.grad, (k.to(BF16) * v).float())


def test_kernels_with_other_names_and_keywords_keep_their_signature() -> None:
    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        """The kernel."""
        assert q.dtype == k.dtype == v.dtype == BF16, "FlashAttention only support fp16 and bf16 data type"
        return q

    guard = Guard("cast", "bf16")
    attend = guard.attention(flash_attn_func)
    assert inspect.signature(attend) == inspect.signature(flash_attn_func)
    assert attend.__doc__ == "The kernel."
    q, k, v = operands(F32, BF16, BF16)
    assert attend(q, k, v, causal=True).dtype == BF16
    assert attend(q=q, k=k, v=v).dtype == BF16
    assert attend(q, v=v, k=k).dtype == BF16
    assert guard.report()["sites"][0]["site"].endswith("flash_attn_func")
    with pytest.raises(TypeError, match="no parameter key"):
        guard.attention(lambda q, x, v: q)


def test_a_compiled_graph_casts_without_breaking() -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        assert query.dtype == key.dtype == value.dtype
        return nn.functional.scaled_dot_product_attention(query, key, value)

    guard = Guard("cast", "bf16")
    guarded = guard.attention(attend)
    compiled = torch.compile(lambda *given: guarded(*given), backend="eager", fullgraph=True)
    mixed, legal = operands(F32, F32, BF16), operands(BF16, BF16, BF16)
    torch.testing.assert_close(compiled(*legal), attend(*legal))
    assert guard.report()["sites"] == [], "a clean graph"
    for _ in range(2):
        torch.testing.assert_close(compiled(*mixed), attend(*(tensor.to(BF16) for tensor in mixed)))
    (site,) = guard.report()["sites"]
    assert (site["arrived"], site["cast_to"], site["casts"]) == ("query fp32, key fp32, value bf16", "bf16", 1)
    assert site["site"].startswith(f"{__file__}:"), "the line that calls"
    assert "counted once per graph" in site["promoted"]
    with torch.autocast("cpu", dtype=F16):
        assert compiled(*mixed).dtype == F16
    assert guard.casts == 2


def test_eight_bits_are_a_format_that_flash_attn_3_takes() -> None:
    guard = Guard("strict", "bf16")
    small = [operand.to(torch.float8_e4m3fn) for operand in operands(F32, F32, F32)]
    assert guard.attention(lambda query, key, value: query)(*small) is small[0]


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_tensors_without_numbers_go_the_same_way(device: str) -> None:
    recorder, attend = wrapped(Guard("cast", "bf16"))
    with FakeTensorMode():
        made = [torch.empty(2, 2, 4, 8, device=device, dtype=F32) for _ in range(3)]
        out, _ = attend(Layer(), *made)
    assert [tensor.dtype for tensor in recorder.got] == [BF16] * 3
    assert out.dtype == F32


class Promoting(nn.Module):
    """A layer whose norm leaves the format on its way to attention."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.inner = Layer()
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = x.float()  # here
        return self.attend(self.inner, query, x, x)[0]


def test_the_first_forward_pass_names_the_line(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard("cast", "bf16")
    _, attend = wrapped(guard)
    model = Promoting(attend)
    forward = model.forward
    guard.watch(model)
    x = torch.randn(2, 2, 4, 8).to(BF16)
    with caplog.at_level(logging.WARNING, logger="halftune.precision.guard"):
        for _ in range(3):
            model(x)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("  # here"))
    (record,) = caplog.records
    said = f"fp32 since {__file__}:{line}: float(bf16), asked for"
    assert record.message == f"inner: attention got query fp32, key bf16, value bf16; cast to bf16; {said}"
    (site,) = guard.report()["sites"]
    assert (site["casts"], site["promoted"]) == (3, said)
    assert model.forward == forward, "nothing stays on the model"
    assert not model._forward_hooks
    assert not model.inner._forward_hooks


def test_a_model_that_keeps_to_its_plan_is_never_recorded() -> None:
    guard = Guard("cast", "fp32")
    _, attend = wrapped(guard)
    model = Promoting(attend)
    guard.watch(model)
    model(torch.randn(2, 2, 4, 8))
    assert "forward" not in vars(model)
    assert guard.report()["sites"] == []


def test_an_error_in_the_recorded_pass_leaves_nothing_behind() -> None:
    guard = Guard("strict", "bf16")
    _, attend = wrapped(guard)
    model = Promoting(attend)
    guard.watch(model)
    with pytest.raises(DtypeContractError, match=r"fp32 since .*test_guard\.py:\d+: float\(bf16\)"):
        model(torch.randn(2, 2, 4, 8).to(BF16))
    assert "forward" not in vars(model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(("cos", "result"), [(F32, F32), (BF16, F32)])
def test_rotary_tables_take_the_inputs_dtype(cos: torch.dtype, result: torch.dtype) -> None:
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
        assert x.dtype == cos.dtype == sin.dtype
        return x * cos + x * sin

    guard = Guard("cast", "bf16")
    x = torch.randn(4, 8)
    out = guard.rotary(rotate)(x, torch.ones(8, dtype=cos), sin=torch.ones(8, dtype=cos))
    assert out.dtype == result
    assert guard.report()["casts"] == int(cos != F32)


class WithACompiledPart(nn.Module):
    """Its author compiled one function; the guard's recording must neither break it nor be blind to it."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, dtype=BF16)
        self.attend = guard.attention(Recorder().__call__)
        self.widened = torch.compile(lambda x: x.float() * 2, backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj(x)
        return self.attend(None, self.widened(y), y, y)[0]


def test_the_recording_goes_into_what_the_models_author_compiled() -> None:
    torch._dynamo.reset()
    guard = Guard("cast", "bf16")
    model = WithACompiledPart(guard)
    guard.watch(model)
    for _ in range(3):
        model(torch.randn(1, 2, 4, 8, dtype=BF16)).float().sum().backward()
    (site,) = guard.report()["sites"]
    assert site["casts"] == 3
    assert "float(bf16), asked for" in site["promoted"]
    torch._dynamo.reset()
