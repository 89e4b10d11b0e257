"""Example additions, one of each kind that CONTRIBUTING.md lists: the files that each touches, and how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Edit = str | tuple[tuple[str, str], ...]  # a whole new file, or (text that is there, text in its place) pairs


@dataclass(frozen=True)
class Addition:
    """One addition to a copy of the repository.

    Attributes:
        what: its kind.
        name: what a recipe calls it.
        edits: path from the repository's root → what happens to that file.
        overrides: of the recipe that uses it.
        shows: (file of the copy, text in it that is there with the addition only).
        test: the contract test that walks the table and so covers the new row; empty where ``edits`` hold a test.
        rows: training rows; the builtin ones by default.
        model_type: of the model that is trained.
    """

    what: str
    name: str
    edits: Mapping[str, Edit]
    overrides: tuple[str, ...]
    shows: tuple[str, str]
    test: str = ""
    rows: tuple[Mapping[str, str], ...] = ()
    model_type: str = "qwen2"

    @property
    def files(self) -> list[str]:
        """The files that it touches, tests included; generated pages are not counted."""
        return sorted(self.edits)

    def apply(self, root: Path) -> None:
        """Makes the edits below ``root``, whose files may be links into a tree that stays as it is.

        Raises:
            ValueError: a file does not say what the edit expects there.
        """
        for name, edit in self.edits.items():
            path = root / name
            text = edit if isinstance(edit, str) else path.read_text()
            for old, new in () if isinstance(edit, str) else edit:
                if old not in text:
                    raise ValueError(f"{name} does not contain {old!r}: update the example addition")
                text = text.replace(old, new, 1)
            path.unlink(missing_ok=True)
            path.write_text(text)


_METHOD_SECTION = '''\
class IpoMethod(ReferenceMethod):
    """Identity preference optimisation (arXiv:2310.12036)."""

    title: ClassVar[str] = "Preference optimisation (IPO)"
    learns: ClassVar[str] = "pairs of a chosen and a rejected answer"
    records: ClassVar[tuple[RecordName, ...]] = ("preference",)
    segments: ClassVar[int] = 2

    type: Literal["ipo"]
    """Identity preference optimisation."""

    tau: Annotated[Number, Field(gt=0)] = 0.1
    """Weight of the difference from the reference."""


MethodSection = Annotated[IpoMethod | '''

_METHOD = '''\
"""Identity preference optimisation (arXiv:2310.12036)."""

from __future__ import annotations

from halftune.config.sections.method import IpoMethod
from halftune.data.batch import WEIGHT, Batch
from halftune.data.store import Example
from halftune.methods import Loss, Method, Reference
from halftune.model.policy.policy import PolicyModel


class Ipo(Method):
    """Squared distance of the log-ratio's margin from ``1 / 2 tau``."""

    metrics = ("margin",)

    def __init__(self, section: IpoMethod) -> None:
        self.target = 1 / (2 * section.tau)

    def weight(self, example: Example) -> float:
        return 1.0

    def loss(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        ratios = policy.sequence_logprobs(batch) - reference.sequence_logprobs(batch)
        chosen, rejected = ratios.view(-1, 2).unbind(1)
        weight, margin = batch.columns[WEIGHT].to(chosen.dtype), chosen - rejected
        measured = ((weight * margin.detach()).sum(), weight.sum())
        return Loss((weight * (margin - self.target).square()).sum(), {"margin": measured})
'''

_OPTIMIZER = '''\
"""torch's RAdam (arXiv:1908.03265)."""

from __future__ import annotations

import torch
from torch import nn

from halftune.config.sections.training import TrainingSection
from halftune.optim.builtin import adam_options
from halftune.optim.builtin import by_decay
from halftune.precision import PrecisionPlan


def build(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> torch.optim.Optimizer:
    """RAdam with decoupled weight decay."""
    groups = by_decay([one for one in model.parameters() if one.requires_grad], training.weight_decay)
    return torch.optim.RAdam(groups, **adam_options(training), decoupled_weight_decay=True)
'''

_BACKEND = '''\
"""Softmax attention written out in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch's own kernel without fused code."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return sdpa_attention_forward(module, *args, **kwargs)
'''
_BACKEND_ROW = """\
    Backend(
        "math",
        "torch",
        EVERYWHERE,
        ALL,
        softcap=False,
        varlen="segments",
        attend="halftune.attention.plain_math:attend",
        mask="transformers.masking_utils:sdpa_mask",
    ),
)


def backend_of("""

_FORMAT = '''\
"""qa rows: ``ask`` and ``reply``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halftune.data.formats.conversation import Conversation, Format
from halftune.data.formats import fields


def _read(row: Mapping[str, Any]) -> Conversation:
    question, answer = fields.text(row, "ask"), fields.answer(row, "reply")
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Conversation(messages, train=(None, None))


FORMAT = Format("qa", ("ask", "reply"), (), _read)
'''
_FORMAT_TEST = """\
def test_qa():
    assert pairs(read("qa", {"ask": "1 + 1?", "reply": "2"})) == [("user", "1 + 1?"), ("assistant", "2")]


def test_alpaca():"""

_PAIR = {"prompt": "What is 1 and 1?", "chosen": "It is 2", "rejected": "No idea"}
ADDITIONS = (
    Addition(
        "training method",
        "ipo",
        {
            "src/halftune/config/sections/method.py": (("MethodSection = Annotated[", _METHOD_SECTION),),
            "src/halftune/methods/__init__.py": (
                ('    "dpo": ', '    "ipo": "halftune.methods.ipo:Ipo",\n    "dpo": '),
            ),
            "src/halftune/methods/ipo.py": _METHOD,
        },
        ("method=ipo",),
        ("run/metrics.jsonl", '"margin"'),
        test="tests/train/test_methods.py",
        rows=(_PAIR,) * 8,
    ),
    Addition(
        "optimizer",
        "radam",
        {
            "src/halftune/config/optimizers.py": (
                ('Optim = Literal["adamw", ', 'Optim = Literal["adamw", "radam", '),
                ('    "sgd": ', '    "radam": OptimizerSpec(_per_weight(2), options=ADAM_OPTIONS),\n    "sgd": '),
            ),
            "src/halftune/optim/__init__.py": (
                ('    "muon": ', '    "radam": "halftune.optim.radam:build",\n    "muon": '),
            ),
            "src/halftune/optim/radam.py": _OPTIMIZER,
        },
        ("training.optim=radam",),
        ("run/plan.json", '"radam"'),
        test="tests/train/test_optimizers.py",
    ),
    Addition(
        "weight format",
        "fp4",
        {
            "src/halftune/config/weight_formats.py": (
                ('OnLoad = Literal["none", ', 'OnLoad = Literal["none", "fp4", '),
                (
                    '    "int8": ',
                    '    "fp4": WeightFormat(0.516, {**_NF4, "bnb_4bit_quant_type": "fp4"}, '
                    '**_BITSANDBYTES),\n    "int8": ',
                ),
            ),
        },
        ("model.quantization=fp4",),
        ("run/plan.json", '"fp4"'),
        test="tests/train/test_weight_formats.py",
    ),
    Addition(
        "model family",
        "starcoder2",
        {
            "src/halftune/config/facts/families.py": (
                (
                    "FAMILIES: dict[str, Family] = {\n",
                    'FAMILIES: dict[str, Family] = {\n    "starcoder2": Family(lora_exclude=("c_proj",)),\n',
                ),
            ),
        },
        (),
        ("log", "c_proj"),
        test="tests/plan/test_every_model_type.py",
        model_type="starcoder2",
    ),
    Addition(
        "attention backend",
        "math",
        {
            "src/halftune/config/sections/model.py": (
                ('Backend = Literal["auto", ', 'Backend = Literal["auto", "math", '),
            ),
            "src/halftune/attention/backends.py": ((")\n\n\ndef backend_of(", _BACKEND_ROW),),
            "src/halftune/attention/plain_math.py": _BACKEND,
        },
        ("attention=math",),
        ("run/plan.json", '"math"'),
        test="tests/attention/test_varlen_flash.py",
    ),
    Addition(
        "row format",
        "qa",
        {
            "src/halftune/config/sections/data.py": (("FormatName = Literal[", 'FormatName = Literal["qa", '),),
            "src/halftune/data/formats/qa.py": _FORMAT,
            "tests/data/test_data_formats.py": (("def test_alpaca():", _FORMAT_TEST),),
        },
        (),
        ("log", "format qa"),
        rows=({"ask": "What is 1 and 1?", "reply": "It is 2"},) * 8,
    ),
)
