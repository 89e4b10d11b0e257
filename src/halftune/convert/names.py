"""Names of optimizers and loggers there and here."""

from __future__ import annotations

from typing import get_args

from halftune.config.sections.training import Logger

# transformers' and axolotl's names → ours.
OPTIMIZERS = {
    theirs: ours
    for ours, names in {
        "adamw": "adamw adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_torch_xla adamw_torch_npu_fused",
        "adamw_8bit": "adamw_8bit adamw_bnb_8bit",
        "paged_adamw_8bit": "paged_adamw_8bit",
        "paged_adamw": "paged_adamw paged_adamw_32bit",
        "adamw_torch_8bit": "adamw_torch_8bit ao_adamw_8bit",
        "adamw_torch_4bit": "adamw_torch_4bit ao_adamw_4bit",
        "lion": "lion lion_32bit lion_pytorch paged_lion_32bit",
        "lion_8bit": "lion_8bit",
        "paged_lion_8bit": "paged_lion_8bit",
        "adafactor": "adafactor",
        "sgd": "sgd",
        "adagrad": "adagrad",
        "muon": "muon",
        "stable_adamw": "stable_adamw",
        "adamw_schedule_free": "schedule_free_adamw",
    }.items()
    for theirs in names.split()
}
LOGGERS = get_args(Logger)
