"""Makes a certificate: the order of the checks, and what they are tried on."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from transformers import initialization

from halftune.certify.certificate import Certificate, Line, listed
from halftune.certify.numbers import same_numbers
from halftune.certify.runs import adapters, methods, resumed, train_losses
from halftune.certify.small_model import write_small_checkpoint
from halftune.certify.tokenizer import check_tokenizer
from halftune.certify.workbench import TOKENIZER, Workbench, reported
from halftune.config.builtin_models import VOCAB_SIZE
from halftune.config.facts.config_file import config_file
from halftune.config.facts.media import AUDIO_FAMILIES, IMAGE_FAMILIES, PROCESSOR_FILES
from halftune.config.facts.model import ModelFacts, read_model_facts
from halftune.config.sections.model import ModelSection
from halftune.config.weight_formats import WEIGHT_FORMATS
from halftune.core.optional import version_of
from halftune.doctor.trace_model import trace_model
from halftune.hardware import Hardware
from halftune.hardware.catalogue import lookup
from halftune.model.attention.packing_check import silent
from halftune.model.files.architectures import no_progress_bars
from halftune.model.files.locate import locate
from halftune.model.meta.model import build, read_config
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import Plan, resolve
from halftune.plan.memory import check_fits

_ROWS = {"images": "patterns", "audio": "tones"}
_DEEP, _DEEP_WITH_STATES = 16, 4  # layers of the copy whose numbers are compared; those with a state are slow
_PACKAGES = ("halftune", "torch", "transformers", "peft")


def certify(
    section: ModelSection, hardware: Hardware, *, kill: bool = True, report: Callable[[Line], None] = lambda _: None
) -> Certificate:
    """Try every promise on a model type, without its weights.

    Args:
        section: the model: its config.json, tokenizer and chat template are read.
        hardware: formats and methods are planned for it.
        kill: whether the run that is resumed is killed in a process of its own.
        report: called with each line as soon as it is known.

    Raises:
        ModelError: there is no such model, or halftune does not train its type.
    """
    began, lines = time.monotonic(), list[Line]()
    facts = read_model_facts(section)
    with tempfile.TemporaryDirectory(prefix="halftune-certify-") as scratch, no_progress_bars(), silent():
        for line in _lines(section, hardware, facts, Path(scratch), kill=kill):
            lines.append(line)
            report(line)
    versions = {name: version_of(name) or "" for name in _PACKAGES}
    machine = hardware.devices[0].name if hardware.devices else hardware.kind
    seconds = round(time.monotonic() - began, 1)
    return Certificate(section.name_or_path, facts.model_type, machine, versions, tuple(lines), seconds)


def _lines(section: ModelSection, hardware: Hardware, facts: ModelFacts, folder: Path, *, kill: bool) -> Iterator[Line]:
    where = {"headers": "its weights' headers", "architecture": "the class of transformers"}
    where["catalogue"] = f"{where['architecture']}, by halftune's catalogue"
    towers = f", and {facts.tower_parameters:,} of its towers" if facts.tower_parameters else ""
    exact = facts.counted_in in where
    bench = Workbench(folder, section, section)
    if facts.counted_in == "own code":  # the plan runs none of it
        yield from _counted(bench)
    else:
        counted = f"{facts.num_parameters:,} weights{towers}, counted in {where.get(facts.counted_in, 'sizes')}"
        yield Line("parameters", "yes" if exact else "note", counted)
    yield from check_tokenizer(bench, facts, _beside(section))
    yield from _formats(bench, hardware, facts)
    yield from _dtypes(bench, hardware, facts)
    lines: list[Line] = []
    small: Workbench | None = None
    with reported("small copy", lines, refused="no"):
        small = _small(bench)
    yield from lines
    if small is None:
        return
    wrong = set[str]()
    for check, run in (
        ("numbers", lambda _: same_numbers(_small(bench, first=_DEEP_WITH_STATES if facts.linear_layers else _DEEP))),
        ("adapters", adapters),
        ("resume", lambda one: resumed(one, kill=kill)),
        ("methods", lambda one: methods(one, hardware, facts, generates="generation" not in wrong)),
        ("images", lambda _: _media(bench, facts)),
    ):
        failed: list[Line] = []
        with reported(check, failed):
            for line in run(small):
                wrong.update({line.check} if line.verdict == "no" else ())
                yield line
        yield from failed


def _counted(bench: Workbench) -> Iterator[Line]:
    """Count the weights in the class of a checkpoint's own code."""
    lines: list[Line] = []
    with reported("parameters", lines, refused="no"):
        plan = resolve(bench.asked("counted").run, lookup("h100"), read_model_facts(bench.whole))
        with torch.device("meta"), initialization.no_init_weights():
            model = build(read_config(bench.whole), bench.whole, plan, "eager")
            model.tie_weights()
        count = sum(one.numel() for one in model.parameters())
        lines.append(Line("parameters", "yes", f"{count:,} weights, counted in the class of the checkpoint's own code"))
    yield from lines


def _small(bench: Workbench, *, seeing: bool = False, first: int = 0) -> Workbench:
    """The workbench of the small copy.

    Args:
        bench: of the model itself.
        seeing: whether the copy keeps the model's own tokenizer and the processor of its images or sounds.
        first: number of the first layers that all stay.

    Raises:
        Exception: the model's code does not support small sizes.
    """
    section, folder = bench.whole, bench.folder / ("seeing" if seeing else f"model-{first}")
    loaded = bench.asked("small", precision="fp32", adapter="none")
    plan = resolve(loaded.run, lookup("cpu"), replace(read_model_facts(section), quantization=None))
    builtin = section.name_or_path.startswith("builtin:")
    source = None if builtin else config_file(section).parent
    whole = None if seeing else VOCAB_SIZE
    write_small_checkpoint(read_config(section), section, plan, source, folder, whole, first)
    if seeing:
        for name in (*PROCESSOR_FILES, "chat_template.jinja", "chat_template.json"):
            if (file := _beside(section) / name).is_file():
                shutil.copy(file, folder)
        load_tokenizer(section).save_pretrained(folder)
    names = {"name_or_path": str(folder), "tokenizer": None if seeing else TOKENIZER}
    small = ModelSection(**names, trust_remote_code=section.trust_remote_code)
    return replace(bench, section=small)


def _beside(section: ModelSection) -> Path:
    """The folder of a model's small files; builtin models are made for it."""
    return locate(section) if section.name_or_path.startswith("builtin:") else config_file(section).parent


def _media(bench: Workbench, facts: ModelFacts) -> Iterator[Line]:
    """Train two steps on images or sounds, if the model has towers for them."""
    if not facts.multimodal:
        return
    sees, hears = facts.model_type in IMAGE_FAMILIES, facts.model_type in AUDIO_FAMILIES
    if not sees and not hears:
        why = f"halftune trains {facts.model_type} on text, and not on images or sounds"
        yield Line("images", "refused", f"{why}; its towers stay as they are")
        return
    if not any((_beside(bench.whole) / name).is_file() for name in PROCESSOR_FILES):
        yield Line("images", "note", f"not tried: no {PROCESSOR_FILES[0]} beside config.json")
        return
    for check in [*["images"] * sees, *["audio"] * hears]:
        lines: list[Line] = []
        with reported(check, lines, refused="no"):
            seeing = _small(bench, seeing=True)
            data = {"train": f"builtin:{_ROWS[check]}", check: True, "max_length": 1024, "packing": False}
            loaded = seeing.recipe(check, data=data, training={"per_device_train_batch_size": 2})
            what = f"two steps on {_ROWS[check]} through the small towers: {train_losses(seeing, loaded)}"
            lines.append(Line(check, "yes", what))
        yield from lines


def _formats(bench: Workbench, hardware: Hardware, facts: ModelFacts) -> Iterator[Line]:
    """Plan every number format and weight format for the machine."""
    for precision in ("bf16", "fp16", "fp32"):
        lines: list[Line] = []
        with reported(f"precision {precision}", lines):
            run = bench.asked(f"in-{precision}", precision=precision).run
            plan = resolve(run, hardware, facts)
            check_fits(plan.memory, run)
            computed = f"{plan.precision.compute.value}, attention by {plan.attention.softmax.value}"
            what = f"LoRA fits: {_gib(plan)}; computes in {computed}"
            if plan.precision.keep_fp32.value:
                what += f", stays fp32: {listed(plan.precision.keep_fp32.value)}"
            lines.append(Line(f"precision {precision}", "yes", what))
        yield from lines
    for name, row in WEIGHT_FORMATS.items():
        if not row.on_load:
            continue
        lines = []
        with reported(f"weights {name}", lines):
            whole = bench.whole.model_copy(update={"quantization": name})
            run = replace(bench, whole=whole).asked(f"in-{name}").run
            plan = resolve(run, hardware, read_model_facts(whole))
            check_fits(plan.memory, run)
            lines.append(Line(f"weights {name}", "yes", f"LoRA fits: {_gib(plan)}"))
        yield from lines


def _gib(plan: Plan) -> str:
    gib = 2**30
    return f"{plan.memory.total / gib:,.1f} of {plan.memory.available / gib:,.1f} GiB"


def _dtypes(bench: Workbench, hardware: Hardware, facts: ModelFacts) -> Iterator[Line]:
    """Trace the whole model without weights in each half format that the machine has."""
    for precision in ("bf16", "fp16"):
        lines: list[Line] = []
        with reported(f"dtypes {precision}", lines):
            seen = {"data": {"train": "builtin:patterns", "images": True}} if facts.model_type in IMAGE_FAMILIES else {}
            config = bench.asked(f"traced-{precision}", precision=precision, **seen).run
            report = trace_model(config, resolve(config, hardware, facts))
            calls = ", ".join(f"{count} × {label}" for label, count in report.calls.items()) or "no attention"
            for one in report.violations:
                place = f" at {one.file}:{one.line}: {one.source}" if one.file else ""
                what = f"{one.operand} arrives in {one.arrives} at {one.target}: {one.op} → {one.becomes}{place}"
                lines.append(Line(f"dtypes {precision}", "no", what, f"attention.guard: {one.guard}"))
            if not report.violations:
                what = f"every operand of attention has the plan's format ({calls}; {report.tensors})"
                lines.append(Line(f"dtypes {precision}", "yes", what))
            lines += [Line(f"dtypes {precision}", "note", note) for note in report.notes]
        yield from lines
