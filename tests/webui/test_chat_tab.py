"""What the Chat tab asks, and which side an answer is shown on: without a browser, with a stand-in for the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

gr = pytest.importorskip("gradio", reason="the web UI's package is not installed")

from halftune_webui.labels import load_words  # noqa: E402
from halftune_webui.runs import chat  # noqa: E402
from halftune_webui.settings import Settings  # noqa: E402
from halftune_webui.tabs.chat import _SAMPLING, Chats, _question, _serve  # noqa: E402

VALUES = {"max_new_tokens": 7.0, "temperature": 0.5, "top_p": 0.9, "top_k": 3.0, "repetition_penalty": 1.0}


def asking(run: Path, act: str = "ask") -> Any:
    talks = {side: [{"role": "user", "content": f"for {side}"}] for side in ("trained", "base", "neither")}
    data = {"act": act, "number": 3, "run": str(run), "conversations": talks}
    return _question(gr.EventData(None, data), "Be brief.", [VALUES[name] for name in _SAMPLING])


def test_a_question_has_the_system_prompt_and_the_sliders(tmp_path: Path) -> None:
    asked = asking(tmp_path)
    system = {"role": "system", "content": "Be brief."}
    said = {side: [system, {"role": "user", "content": f"for {side}"}] for side in ("trained", "base")}
    assert (asked.talks, asked.number, asked.run) == (said, 3, str(tmp_path))
    assert asked.generation == VALUES
    assert all(type(asked.generation[name]) is int for name in ("max_new_tokens", "top_k"))
    assert asking(tmp_path, act="load").talks == {}


def test_each_side_is_answered_by_its_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).with_name("stand_in_chat.py")
    monkeypatch.setattr(chat, "HALFTUNE", (sys.executable, str(script)))
    root = tmp_path.resolve()
    run = root / "runs" / "one"
    (run / "final").mkdir(parents=True)
    recipe = {"model": {"name_or_path": "builtin:qwen2-tiny"}, "data": {"train": "builtin:python-docs"}}
    (run / "resolved.yaml").write_text(json.dumps({**recipe, "training": {"output_dir": str(run)}}))
    (run / "finished.json").write_text(json.dumps({"step": 3}))
    context: Any = SimpleNamespace(settings=Settings((root,), root / "runs"), words=load_words("en"))
    chats = Chats()
    try:
        pieces = [json.loads(one) for one in _serve(context, chats, "page", asking(run))]
    finally:
        chats.close("page")
    assert [pieces[0]["state"], pieces[-1]["state"], pieces[-1]["over"]] == ["loading", "ready", True]
    answers = {side: (one["text"], one["done"]) for side, one in pieces[-1]["answers"].items()}
    assert answers == {"trained": ("tuned for trained", True), "base": ("base for base", True)}
