"""The process that holds a model for the Chat tab: spoken to, stopped, missed, gone; with a stand-in for the model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import until

from halftune.core.errors import HalftuneError
from halftune_webui.runs import ask, chat
from halftune_webui.runs.ask import Asks
from halftune_webui.runs.chat import Chat

SCRIPT = Path(__file__).with_name("stand_in_chat.py")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "HALFTUNE", (sys.executable, str(SCRIPT)))


@pytest.fixture
def talk() -> Iterator[Chat]:
    opened = Chat(Path("run"))
    yield opened
    opened.close()


def said(opened: Chat, text: str, *, adapter: bool = True) -> str:
    pieces = list(opened.answer([{"role": "user", "content": text}], adapter=adapter, generation={}))
    return pieces[-1][0]


def test_answers_come_in_pieces_from_either_model(talk: Chat) -> None:
    assert talk.ready()["base"] == "tiny"
    answers = [text for text, _ in talk.answer([{"role": "user", "content": "a b"}], adapter=True, generation={})]
    assert answers == ["tuned ", "tuned a ", "tuned a b ", "tuned a b"]
    assert said(talk, "a", adapter=False) == "base a"


def test_an_answer_that_is_stopped_or_left_does_not_spoil_the_next(talk: Chat) -> None:
    pieces = talk.answer([{"role": "user", "content": "long"}], adapter=True, generation={})
    next(pieces)
    talk.stop()
    *_, (_, event) = pieces
    assert event is not None
    assert event["stopped"]
    left = talk.answer([{"role": "user", "content": "x " * 50}], adapter=True, generation={})
    next(left)
    left.close()  # the page went away in the middle
    assert said(talk, "next") == "tuned next"


def test_what_is_wrong_is_said_in_its_words(talk: Chat) -> None:
    with pytest.raises(HalftuneError, match="top_p: too big"):
        said(talk, "wrong")
    assert said(talk, "a") == "tuned a"
    with pytest.raises(HalftuneError, match=r"^out of GPU memory"):
        said(talk, "die")
    assert not talk.alive
    with pytest.raises(HalftuneError, match="out of GPU memory"):
        said(talk, "again")


def test_a_model_that_does_not_load() -> None:
    broken = Chat(Path("broken"))
    with pytest.raises(HalftuneError, match=r"^runs/x: the run has no result yet"):
        broken.ready()
    broken.close()


def test_the_memory_is_given_back_when_nobody_asks() -> None:
    idle = Chat(Path("run"))
    idle.ready()
    idle.idle = 0.05  # counts from the end of the next answer
    assert said(idle, "a") == "tuned a"
    until(lambda: not idle.alive, "the end of the process")


def test_a_verb_that_fails_speaks_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "verb.py"
    script.write_text(
        "import sys\n"
        "print('halftune data: rows.jsonl: no such file · name one', file=sys.stderr) if 'bad' in sys.argv else None\n"
        'print("{}" if "bad" not in sys.argv else "")\n'
        "sys.exit(2 if 'bad' in sys.argv else 1)\n"
    )
    monkeypatch.setattr(ask, "HALFTUNE", (sys.executable, str(script)))
    assert Asks().ask("page", "doctor", good=(0, 1)) == {}
    with pytest.raises(HalftuneError, match="ended with code 1"):
        Asks().ask("page", "doctor")
    with pytest.raises(HalftuneError, match=r"^rows\.jsonl: no such file · name one$"):
        Asks().ask("page", "data", "bad")


def test_a_recipe_of_the_browser_goes_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in a file of the web UI while it is looked at, which nobody knows."""
    script = tmp_path / "verb.py"
    script.write_text(
        "import json, sys\n"
        "print('halftune data:', sys.argv[3] + ':3: too small', file=sys.stderr) if 'bad' in sys.argv else None\n"
        "print(json.dumps({'where': sys.argv[3]}))\nsys.exit('bad' in sys.argv)\n"
    )
    monkeypatch.setattr(ask, "HALFTUNE", (sys.executable, str(script)))
    folder = tmp_path / "Größe 1"
    folder.mkdir()
    with ask.recipe_file(folder, "model: 3") as file:
        assert Asks().ask("page", "doctor", recipe=file) == {"where": "recipe.yaml"}
        with pytest.raises(HalftuneError, match=r"^recipe\.yaml:3: too small$"):
            Asks().ask("page", "data", "bad", recipe=file)
