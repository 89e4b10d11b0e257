"""Checkpoints with Python code of their own, as somebody else would write it, that import flash_attn by hand."""

from __future__ import annotations

import itertools
import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from standins.flash import flash_attn_installed
from transformers import AutoConfig, AutoModelForCausalLM

_NUMBERS = itertools.count()

_CONFIGURATION = """
from transformers import PretrainedConfig

class StrangerConfig(PretrainedConfig):
    model_type = "@KIND@"

    def __init__(self, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64, **rest):
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        self.num_attention_heads, self.vocab_size = num_attention_heads, vocab_size
        super().__init__(**rest)
"""
_MODELING = """
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_@KIND@ import StrangerConfig
IMPORTS


class Mixer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.size = width // self.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        MADE

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (p(x).view(rows, length, self.heads, self.size) for p in (self.q_proj, self.k_proj, self.v_proj))
        ATTENDED
        return self.o_proj(out.reshape(rows, length, width))


class StrangerForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = StrangerConfig
    supports_gradient_checkpointing = True
    gradient_checkpointing = False

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Mixer(config, index) for index in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids=None, attention_mask=None, use_cache=None, past_key_values=None, **rest):
        x = self.embedding(input_ids)
        for block in self.blocks:
            again = self.gradient_checkpointing and self.training
            x = x + (checkpoint(block, x, use_reentrant=False) if again else block(x))
        return CausalLMOutputWithPast(logits=self.head(x))
"""


@dataclass(frozen=True)
class Stranger:
    """A checkpoint.

    Attributes:
        folder: with config.json, weights and code.
        marks: line of the modeling file that ends with ``# promotes NAME``, by NAME.
    """

    folder: Path
    marks: dict[str, str]


def stranger(
    folder: Path, attended: str, *, imports: str = "", made: str = "", vocab_size: int = 4096, layers: int = 2
) -> Stranger:
    """A checkpoint in fp32 whose attention is ``attended``: q, k, v ``[B, T, H, D]`` → out.

    ``made`` makes what it needs for the layer ``index``.
    """
    kind = f"unheardof{next(_NUMBERS)}"  # a process keeps the first class that it saw for a type
    code = _MODELING.replace("IMPORTS", imports).replace("@KIND@", kind)
    for word, body in (("MADE", made), ("ATTENDED", attended)):
        code = code.replace(word, textwrap.indent(textwrap.dedent(body).strip(), " " * 8).strip())
    folder.mkdir(parents=True)
    file = folder / f"modeling_{kind}.py"
    file.write_text(code)
    (folder / f"configuration_{kind}.py").write_text(_CONFIGURATION.replace("@KIND@", kind))
    classes = {
        "AutoConfig": f"configuration_{kind}.StrangerConfig",
        "AutoModelForCausalLM": f"modeling_{kind}.StrangerForCausalLM",
    }
    sizes = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2, "vocab_size": vocab_size}
    flags = {"tie_word_embeddings": False, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": classes, **sizes, **flags}))
    with torch.random.fork_rng(devices=[]), flash_attn_installed():
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True, attn_implementation="eager")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]  # nobody has imported it yet
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    lines = enumerate(code.splitlines(), 1)
    marks = {line.rpartition(" ")[2]: f"{file}:{at}" for at, line in lines if "# promotes" in line}
    return Stranger(folder, marks)
