"""The Train tab: a recipe, and what it will do on this machine."""

from __future__ import annotations

from halftune_webui.context import Context


def build(context: Context) -> None:
    """The recipe with its start button."""
    context.recipe.render()
    context.start.render()
