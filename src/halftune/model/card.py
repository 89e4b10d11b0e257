"""What whoever loads a written model elsewhere must know: a README beside weights whose code came with a checkpoint."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from halftune.model.computed import is_foreign, uncomputed

CARD = "README.md"
_TEXT = """\
# Before you load this model

Its Python code computes {names} when it is made, and no file holds them. `from_pretrained` of transformers 5 makes a
model without memory first, and does not run code again that it does not know: these tensors are then whatever stood in
memory, **without an error or a warning**, and the answers are wrong.

`halftune chat`, `export` and `train` compute them again. Elsewhere, load it so (read the Python files in this folder
first: they run):

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


def write_card(model: nn.Module, folder: Path) -> None:
    """Writes ``README.md`` where transformers alone would load the model wrongly; nothing elsewhere.

    Raises:
        OSError: it cannot be written.
    """
    names = list(dict.fromkeys(uncomputed(model))) if is_foreign(model) else []
    if names:
        shown = ", ".join(f"`{name}`" for name in names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
        (folder / CARD).write_text(_TEXT.format(names=shown), encoding="utf-8")
