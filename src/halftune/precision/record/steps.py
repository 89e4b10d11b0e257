"""Records of torch calls, and the search for the call that made a tensor fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

HALF = (torch.bfloat16, torch.float16)
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_SHAPED_LIKE = frozenset({"view_as", "reshape_as", "expand_as"})  # only the shape of the second operand matters
_LOWERED = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d"})
_CASTS = frozenset({"float", "to", "type", "type_as", "double", "_to_copy"})
_SPELLED = {"truediv": "div", "matmul": "matmul", "getitem": "index", "setitem": "index_put"}


@dataclass(frozen=True)
class Place:
    """A line of source: file, line number, function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Source:
    """An operand of a torch call.

    Attributes:
        dtype: its dtype.
        scalar: whether it has no dimensions, so that it promotes nothing.
        step: the call that made it, or None.
        leaf: what it is where no call made it: ``parameter model.norm.weight``, ``buffer …``, or empty.
    """

    dtype: torch.dtype
    scalar: bool
    step: Step | None
    leaf: str

    @property
    def constant(self) -> bool:
        """Whether it depends on buffers only, like rotary tables."""
        return self.step.constant if self.step is not None else self.leaf.startswith("buffer ")


@dataclass
class Step:
    """A torch call in the model's source with a floating result.

    Attributes:
        index: order of execution.
        op: the call's name.
        sources: its floating operands.
        dtype: of its result.
        place: where it is written.
        module: path of the module that was running.
        explicit: whether the caller asked for the result's dtype.
        autocast: autocast's dtype at the time, None where it was off.
        outside: whether the model's own code had switched autocast off.
        constant: whether its operands come from buffers and from nothing else.
    """

    index: int
    op: str
    sources: tuple[Source, ...]
    dtype: torch.dtype
    place: Place
    module: str
    explicit: bool
    autocast: torch.dtype | None = field(default=None)
    outside: bool = False
    constant: bool = field(init=False)

    def __post_init__(self) -> None:
        self.constant = all(source.constant for source in self.sources)

    @property
    def promotes(self) -> bool:
        """Whether a half-precision operand yields a wider result."""
        sources = self.sources[:1] if self.op in _SHAPED_LIKE else self.sources
        return self.dtype not in HALF and any(source.dtype in HALF and not source.scalar for source in sources)

    @property
    def carries(self) -> bool:
        """Whether a half-precision operand is data, not a table."""
        return any(source.dtype in HALF and not source.scalar and not source.constant for source in self.sources)

    @property
    def escapes(self) -> bool:
        """Whether autocast would have cast it to half precision if the model's code had not disabled autocast."""
        return self.outside and self.op in _LOWERED and self.dtype not in HALF and not self.constant

    @property
    def wide(self) -> list[Source]:
        """Wide operands, which can promote the result."""
        return [source for source in self.sources if source.dtype not in HALF and not source.scalar]

    def formula(self) -> str:
        """Return the call as ``addcmul(fp16, fp16, fp32)``."""
        return f"{self.op}({', '.join(shown(source.dtype) for source in self.sources)})"

    def cause(self) -> str:
        """Return the reason why the result is fp32."""
        if self.escapes and not self.promotes:
            return "the model's code switches autocast off here"
        if self.explicit or self.op in _CASTS:
            return "asked for"
        if self.wide:
            named = "; ".join(dict.fromkeys(leaf for source in self.wide for leaf in [_origin(source)] if leaf))
            return f"type promotion, fp32 from {named}" if named else "type promotion"
        return "autocast's fp32 list" if self.autocast is not None else "the operation's own doing"


def shown(dtype: torch.dtype) -> str:
    """Return ``bf16``, ``fp16``, ``fp32``, or torch's name."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def spelled(name: str) -> str:
    """Return a torch function's plain name: ``__rmul__`` → ``mul``, ``add_`` → ``add``."""
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        name = name[1:] if name in ("radd", "rmul", "rsub", "rtruediv", "rpow", "rmatmul") else name
        name = name[1:] if name in ("iadd", "imul", "isub", "itruediv", "ipow") else name
        return _SPELLED.get(name, name)
    return name.rstrip("_") or name


def _origin(source: Source) -> str:
    """The origin of a wide operand: its weights and buffers, or the line that created it."""
    if source.leaf:
        return source.leaf
    if source.step is None:
        return ""
    leaves = [step_source.leaf for step in _region(source.step) for step_source in step.wide if step_source.leaf]
    if leaves:
        return ", ".join(list(dict.fromkeys(leaves))[:2])
    return f"{source.step.op} at {Path(source.step.place.file).name}:{source.step.place.line}"


def _region(end: Step) -> Iterator[Step]:
    """Yield the steps of the fp32 region that ends at ``end``, latest first.

    It begins where the model's code takes a matmul out of autocast: whatever was wide before would be half after.
    """
    seen, waiting = {end.index}, [end]
    while waiting:
        step = waiting.pop(0)
        yield step
        if step.escapes and not any(_just_cast(source) for source in step.wide):
            continue
        for source in step.wide:
            if source.step is not None and source.step.index not in seen:
                seen.add(source.step.index)
                waiting.append(source.step)


def _just_cast(source: Source) -> bool:
    """Whether an operand was cast from half precision for this call."""
    return source.step is not None and source.step.promotes and source.step.op in _CASTS


def first_promotion(end: Step) -> Step:
    """Return the call at which a wide tensor left half precision; if it never was, the call that computed it.

    Walks back over calls whose results are wide and takes the earliest that was given something half: of those through
    which data flows, else of those that make tables of buffers. Where there is none (fp32 weights, no autocast), the
    nearest matmul outside of autocast, else the nearest call with a weight or buffer, else ``end`` itself.
    """
    region = list(_region(end))
    promotions = [step for step in region if step.promotes]
    if promotions:
        return min(promotions, key=lambda step: (not step.carries, step.index))
    escaped = [step for step in region if step.escapes]
    weighted = [step for step in region if any(source.leaf for source in step.sources)]
    return next(iter([*escaped, *weighted]), end)
