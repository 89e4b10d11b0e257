"""Simple decay and Mamba-2's scan against the token recurrence."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from interpreter import interpreting
from operator_checks import BOUNDS, assert_matches, assert_packed_as_alone

from halftune_kernels import selfcheck
from halftune_kernels.arguments import ArgumentError, Segments
from halftune_kernels.cases import Case, case, rounded
from halftune_kernels.ops.ssd import SimpleDecay, reference, simple_decay, simple_decay_step
from halftune_kernels.ops.ssd.mamba2 import mamba2_chunk_scan, mamba2_selective_state_update
from halftune_kernels.selfcheck import relative_error


def test_reference_gradients() -> None:
    torch.manual_seed(0)
    shapes = [(1, 5, 1, 3), (1, 5, 1, 3), (1, 5, 2, 2), (1, 5, 2), (1, 5, 2), (3, 2, 3, 2)]
    q, k, v, g, w, state = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    segments, wide = Segments((0, 1, 1, 5)), torch.float64
    assert torch.autograd.gradcheck(
        lambda q, k, v, g, w, state: reference.simple_decay(
            SimpleDecay(q, k, v, -g.exp(), w, 0.7, state, segments, wide)
        ),
        (q, k, v, g, w, state),
    )


@pytest.mark.parametrize("bounds", BOUNDS)
def test_cpu_is_the_recurrence(bounds: tuple[int, ...], poisoned: None) -> None:
    assert_matches(case("ssd", 16, bounds, seed=bounds[-1]), "cpu", torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 96, 256])
def test_cpu_in_each_dtype(dtype: torch.dtype, size: int, poisoned: None) -> None:
    assert_matches(case("ssd", size, (0, 1, 65, 100), seed=size), "cpu", dtype)


def wide_values() -> Case:
    """A value head wider than a key head may be: Zamba2's default is 640."""
    torch.manual_seed(5)
    shapes = {"q": (1, 16), "k": (1, 16), "v": (2, 320)}
    inputs = {name: torch.randn(1, 70, *shape, dtype=torch.float64) / 4 for name, shape in shapes.items()}
    inputs["g"] = -torch.rand(1, 70, 2, dtype=torch.float64)
    return Case("ssd", "halftune_kernels.ops.ssd:simple_decay", inputs, ("g",), {"output_final_state": True})


def test_wide_values() -> None:
    assert_matches(wide_values(), "cpu", torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_values_in_the_kernels(dtype: torch.dtype, poisoned: None) -> None:
    made = rounded(wide_values(), dtype)
    with interpreting():
        found = made.call(dtype, torch.device("cpu"), "triton")
    for name, value in made.call(torch.float64, torch.device("cpu"), "reference").items():
        assert relative_error(found[name], value) <= selfcheck.bound(name, dtype), name


@pytest.mark.slow
def test_cpu_over_long_rows() -> None:
    assert_matches(case("ssd", 64, (0, 3, 800), seed=800), "cpu", torch.float32)


def test_neighbours_in_a_packed_row_do_not_matter() -> None:
    axes = {"q": 1, "k": 1, "v": 1, "g": 1, "w": 1, "initial_state": -1}
    assert_packed_as_alone(case("ssd", 16, (0, 1, 64, 64, 150)), axes, "cpu")


@pytest.mark.parametrize("decay", [0.0, -1e-4, -30.0, -1000.0])
def test_extreme_decays(decay: float) -> None:
    plain = case("ssd", 16, (0, 130), seed=3)
    inputs = plain.inputs | {"g": torch.full_like(plain.inputs["g"], decay)}
    assert_matches(dataclasses.replace(plain, inputs=inputs), "cpu", torch.float32)


def test_one_decay_per_head_and_a_batch() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 70, 2, 8) for _ in range(3))
    slopes = -torch.rand(2)
    whole, state = simple_decay(q, k, v, slopes, output_final_state=True)
    for row in range(2):
        one, last = simple_decay(
            q[row : row + 1], k[row : row + 1], v[row : row + 1], slopes.expand(1, 70, 2),
            output_final_state=True, backend="reference",
        )  # fmt: skip
        assert last is not None
        assert state is not None
        assert relative_error(whole[row], one[0]) < 1e-5
        assert relative_error(state[row], last[0]) < 1e-5


def test_steps_are_the_scan() -> None:
    torch.manual_seed(2)
    q, k, v, g = torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 4, 6), -torch.rand(2, 9, 4)
    o, final = simple_decay(q, k, v, g, output_final_state=True)
    assert final is not None
    state = torch.zeros(2, 4, 8, 6)
    for t in range(9):
        assert relative_error(simple_decay_step(q[:, t], k[:, t], v[:, t], g[:, t], state), o[:, t]) < 1e-5
    assert relative_error(state, final) < 1e-5


def _mamba(heads: int = 4, groups: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    return {
        "hidden_states": torch.randn(2, 70, heads, 8),
        "dt": torch.randn(2, 70, heads),
        "A": -torch.rand(heads) * 4,
        "B": torch.randn(2, 70, groups, 16),
        "C": torch.randn(2, 70, groups, 16),
        "D": torch.randn(heads),
        "dt_bias": torch.randn(heads),
        "initial_states": torch.randn(2, heads, 8, 16),
    }


def test_chunk_scan_is_that_of_transformers() -> None:
    from transformers.models.bamba import modeling_bamba

    theirs = modeling_bamba.mamba2_chunk_scan.__wrapped__
    results = []
    for scan in (theirs, mamba2_chunk_scan):
        given = {name: x.clone().requires_grad_() for name, x in _mamba().items()}
        y, state = scan(**given, chunk_size=16, dt_softplus=True, dt_limit=(0.1, 2.0), return_final_states=True)
        (y.square().sum() + state.square().sum()).backward()
        results.append([y, state, *(x.grad for x in given.values())])
    for their, our in zip(*results, strict=True):
        assert relative_error(our, their) < 1e-5


def test_chunk_scan_keeps_samples_apart_by_either_argument() -> None:
    given = {name: x for name, x in _mamba().items() if name != "initial_states"}
    row = {name: x[:1] if x.shape[0] == 2 else x for name, x in given.items()}
    cu = torch.tensor([0, 3, 40, 70], dtype=torch.int32)
    seq_idx = torch.repeat_interleave(torch.arange(3), cu.diff())[None].int()
    by_bounds = mamba2_chunk_scan(**row, dt_softplus=True, cu_seqlens=cu)
    assert torch.equal(by_bounds, mamba2_chunk_scan(**row, dt_softplus=True, seq_idx=seq_idx))
    tokens = {"hidden_states", "dt", "B", "C"}
    for start, end in ((0, 3), (3, 40), (40, 70)):
        alone = {name: x[:, start:end] if name in tokens else x for name, x in row.items()}
        assert relative_error(by_bounds[:, start:end], mamba2_chunk_scan(**alone, dt_softplus=True)) < 1e-6


def test_chunk_scan_of_a_gate_is_the_product() -> None:
    given = _mamba()
    z = torch.randn(2, 70, 4, 8)
    product = mamba2_chunk_scan(**given) * torch.nn.functional.silu(z)
    assert relative_error(mamba2_chunk_scan(**given, z=z), product) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gated_scan_in_half_rounds_its_output_once(dtype: torch.dtype, poisoned: None) -> None:
    """Gradients of the fp32 parameters, which are summed over the row, see nothing of the rounding."""
    generator = torch.Generator().manual_seed(6)
    shapes = {"hidden_states": (1, 70, 4, 16), "z": (1, 70, 4, 16), "B": (1, 70, 2, 16), "C": (1, 70, 2, 16)}
    shapes |= {"dt": (1, 70, 4), "A": (4,), "dt_bias": (4,), "D": (4,)}
    inputs = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    inputs["A"] = -inputs["A"].exp()
    options = {"dt_softplus": True, "return_final_states": False}
    function = "halftune_kernels.ops.ssd.mamba2:mamba2_chunk_scan"
    made = rounded(Case("ssd", function, inputs, ("A", "dt_bias", "D", "dt"), options), dtype)
    truth, found = (made.call(kind, torch.device("cpu"), "cpu") for kind in (torch.float64, dtype))
    for name in ("d A", "d dt_bias", "d D"):
        assert relative_error(found[name], truth[name]) < 1e-5, name


def test_state_update_is_that_of_transformers() -> None:
    from transformers.models.bamba import modeling_bamba

    theirs = modeling_bamba.mamba2_selective_state_update.__wrapped__
    given = _mamba()
    states = [given["initial_states"].clone() for _ in range(2)]
    outputs = []
    for update, state in zip((theirs, mamba2_selective_state_update), states, strict=True):
        outputs.append(
            update(
                state,
                given["hidden_states"][:, 0],
                given["dt"][:, 0, :, None].expand(-1, -1, 8),
                given["A"][:, None, None].expand(-1, 8, 16),
                given["B"][:, 0],
                given["C"][:, 0],
                D=given["D"][:, None].expand(-1, 8),
                dt_bias=given["dt_bias"][:, None].expand(-1, 8),
                dt_softplus=True,
            )
        )
    assert relative_error(outputs[1], outputs[0]) < 1e-5
    assert relative_error(states[1], states[0]) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 6, 2, 9)}, "k is of shape [1, 6, 2, 9], expected [B, T, G, K] with B=1, T=6, G=2, K=8"),
        ({"k": torch.zeros(1, 6, 2, 8, dtype=torch.bfloat16)}, "k is torch.bfloat16, expected torch.float32"),
        ({"v": torch.zeros(1, 6, 3, 5)}, "v is of 3 heads, expected a multiple of k's 2"),
        (
            {"q": torch.zeros(1, 6, 2, 257), "k": torch.zeros(1, 6, 2, 257)},
            "k is of head size 257, expected a head size of",
        ),
        ({"g": torch.zeros(1, 6, 2)}, "g is of shape [1, 6, 2], expected [B, T, H]"),
        ({"cu_seqlens": torch.tensor([0, 4, 2, 6])}, "falling at 2: 4 then 2, expected never falling"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens is from 0 to 5, expected from 0 to T = 6"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "cu_seqlens is torch.float32 of shape [2], expected int32 or int64"),
        ({"seq_idx": torch.zeros(1, 5, dtype=torch.int32)}, "seq_idx is torch.int32 of shape [1, 5]"),
        ({"initial_state": torch.zeros(2, 4, 8, 5)}, "initial_state is of shape [2, 4, 8, 5], expected [N, H, K, V]"),
        ({"backend": "cuda"}, "requested is 'cuda', expected one of 'triton'"),
    ],
)
def test_complaints_name_the_argument(change: dict[str, object], message: str) -> None:
    q, v = torch.zeros(1, 6, 2, 8), torch.zeros(1, 6, 4, 5)
    arguments = {"q": q, "k": q, "v": v, "g": torch.zeros(1, 6, 4)} | change
    with pytest.raises(ArgumentError) as caught:
        simple_decay(**arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_packed_rows_come_one_at_a_time() -> None:
    x = torch.zeros(2, 6, 2, 8)
    with pytest.raises(ArgumentError, match="batch size is 2, expected 1 with cu_seqlens"):
        simple_decay(x, x, x, torch.zeros(2, 6, 2), cu_seqlens=torch.tensor([0, 6]))
