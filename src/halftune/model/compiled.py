"""torch.compile layer by layer: what lies around the layers (masks, head and loss) stays as it is without it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

BACKEND = "inductor"


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile each layer as one graph, so that FSDP2 and checkpointing act between graphs.

    Args:
        layers: a model's decoder layers, before they are sharded.
    """
    import torch._dynamo.config as settings  # importing it takes seconds

    # A graph for each layer where layers differ, and another one for other lengths of rows.
    settings.recompile_limit = max(settings.recompile_limit, 4 * len(layers))
    for layer in layers:
        layer.compile(backend=BACKEND)
