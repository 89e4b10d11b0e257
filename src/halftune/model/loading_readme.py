"""Writes a README next to saved weights if plain transformers would load the model incorrectly."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from halftune.model.runtime_buffers import is_foreign, unsaved_tensors

README = "README.md"
_TEXT = """\
# Before you load this model

Its Python code computes {names} in the constructor, and no file contains them. `from_pretrained` of transformers 5
builds the model on the meta device and does not recompute such tensors: they are uninitialised memory, **without an
error or a warning**, and the answers are wrong.

`halftune chat`, `export` and `train` recompute them. Elsewhere, load the model as follows (review the Python files in
this folder first: they are executed):

```python
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

folder = "."  # this one
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=True)  # computes them
for file in sorted(Path(folder).glob("*.safetensors")):
    model.load_state_dict(load_file(file), strict=False, assign=True)  # weights in their own format
model.tie_weights()
model.eval()
```
"""


def write_loading_readme(model: nn.Module, folder: Path) -> None:
    """Write ``README.md`` if plain transformers would load the model incorrectly.

    Raises:
        OSError: the file cannot be written.
    """
    names = list(dict.fromkeys(unsaved_tensors(model))) if is_foreign(model) else []
    if names:
        shown = ", ".join(f"`{name}`" for name in names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
        (folder / README).write_text(_TEXT.format(names=shown), encoding="utf-8")
