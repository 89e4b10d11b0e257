"""What the Train tab answers, without a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

gr = pytest.importorskip("gradio", reason="the web UI's package is not installed")

from halftune_webui.app import build  # noqa: E402
from halftune_webui.plans.planning import HERE  # noqa: E402
from halftune_webui.recipes.recipe import shipped  # noqa: E402
from halftune_webui.settings import Settings  # noqa: E402
from halftune_webui.tabs.train import FIRST, OWN  # noqa: E402


def test_a_tab_that_opens_before_its_recipe_is_back_leaves_everything_as_it_is(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    (opened,) = (
        one.fn
        for one in build(Settings((root,), root / "runs")).fns.values()
        if one.fn is not None and (one.fn.__module__, one.fn.__name__) == ("halftune_webui.tabs.train", "opened")
    )
    for nothing in (None, ""):
        assert all(one == gr.skip() for one in opened(nothing, HERE))
    text = shipped(FIRST)
    for recipe, name in ((text, FIRST), (f"{text}# mine\n", OWN)):
        shown = opened(recipe, HERE)
        assert shown[0] == name
        assert len(shown) == len(opened(None, HERE))
