"""The vision tower of Qwen2.5-Omni as transformers 4.52.4 released it, in the thinker of the installed release.

Needs that release's wheel, or its folder: ``pip download transformers==4.52.4 --no-deps -d FOLDER``, and the path in
``HALFTUNE_RELEASED_TRANSFORMERS``. Its vision attention rotates by flash_attn's helper: the input in fp32, the tables
in the dtype that their frequencies have.
"""

from __future__ import annotations

import ast
import math
import os
import sys
import zipfile
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni

VARIABLE, FILE = "HALFTUNE_RELEASED_TRANSFORMERS", "transformers/models/qwen2_5_omni/modeling_qwen2_5_omni.py"
NAME = "released_omni_tower"
PARTS = (
    "Qwen2RMSNorm", "Qwen2_5OmniVisionFlashAttention2", "Qwen2_5OmniMLP", "Qwen2_5OmniVisionBlock",
    "Qwen2_5_VisionPatchEmbed", "Qwen2_5_VisionRotaryEmbedding", "Qwen2_5OmniPatchMerger", "Qwen2_5OmniVisionEncoder",
)  # fmt: skip


def released_tower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the released vision tower into the thinker; returns the file, whose line numbers it has.

    Args:
        folder: where the file of a wheel is unpacked.
        monkeypatch: undoes it. ``flash_attn`` is importable, as its stand-in.
    """
    given = Path(os.environ.get(VARIABLE, "absent"))
    if not given.exists():
        pytest.skip(f"{VARIABLE} names no wheel or folder of transformers 4.52.4")
    if given.is_file():
        zipfile.ZipFile(given).extract(FILE, folder)
        given = folder
    file, module = given / FILE, ModuleType(NAME)
    helper, kernel = import_module("flash_attn.layers.rotary"), import_module("flash_attn.flash_attn_interface")
    tree = ast.parse(file.read_text())
    tree.body = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name in PARTS]
    assert len(tree.body) == len(PARTS)
    vars(module).update(
        {name: getattr(omni, name) for name in dir(omni) if name.endswith(("Config", "PreTrainedModel"))}
        | {"torch": torch, "nn": nn, "F": functional, "math": math, "ACT2FN": ACT2FN, "__file__": str(file)}
        | {"apply_rotary_emb": helper.apply_rotary_emb, "flash_attn_varlen_func": kernel.flash_attn_varlen_func}
        # the table has this class for flash_attention_2, which other releases call otherwise
        | {"QWEN2_5_OMNI_VISION_ATTENTION_CLASSES": defaultdict(lambda: vars(module)[PARTS[1]])}
    )
    monkeypatch.setitem(sys.modules, NAME, module)
    exec("from __future__ import annotations\nfrom typing import *", vars(module))
    exec(compile(tree, str(file), "exec"), vars(module))
    encoder: Any = vars(module)["Qwen2_5OmniVisionEncoder"]

    class Tower(encoder):
        """Takes and gives what the installed release's does."""

        def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **_: Any) -> Any:
            return BaseModelOutputWithPooling(pooler_output=super().forward(hidden_states, grid_thw))

    monkeypatch.setattr(omni, "Qwen2_5OmniVisionEncoder", Tower)
    return file
