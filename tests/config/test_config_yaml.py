"""Files that are no recipe at all: one line says what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from halftune.config import recipes as shipped
from halftune.config.load import LoadedConfig, load_config
from halftune.config.reading.yaml_source import parse, scalar
from halftune.core.errors import ConfigError

CASES = {
    "": "x.yaml: empty file",
    "# only a comment\n": "x.yaml: empty file",
    "- a\n- b\n": "x.yaml:1: expected a mapping, got a list",
    "just text\n": "x.yaml:1: expected a mapping, got a single value",
    "a:\n\tb: 1\n": "x.yaml:2: indentation with a tab",
    "a: 'open\nb: 1\n": "x.yaml:1: unclosed quote",
    "a: [1, 2\nb: 3\n": "x.yaml:1: unclosed bracket or brace",
    "model:x\nb: 1\n": "x.yaml:1: expected 'key: value' · write a colon and a space",
    "a: b: c\n": "x.yaml:1: a second colon in one line",
    "a: 1\n  b: 2\n": "x.yaml:2: this key is indented deeper than the one above",
    "a:\n    b: 1\n  c: 2\n": "x.yaml:3: inconsistent indentation",
    "a: *nowhere\n": "x.yaml:1: undefined alias",
    "a: 1\n---\nb: 2\n": "x.yaml:2: a second document",
    'a: "\\d"\n': "x.yaml:1: unknown escape",
    "a: @x\n": "x.yaml:1: a value cannot start with this character",
    "a: \x00\n": "x.yaml:1: character U+0000",
    "a: &x [*x]\n": "nested too deeply",
    "[" * 500: "nested too deeply",
    "{a: " * 5000: "nested too deeply",
    "a: &a [1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
    "d: &d [*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d,*d]\n": "more than 10,000 values",
}


@pytest.mark.parametrize("text", CASES, ids=lambda text: repr(text[:24]))
def test_syntax(text: str, problems: Callable[..., list[str]]) -> None:
    (line,) = problems(text)
    assert CASES[text] in line


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart.yaml").write_text("a: 1")
    Path("latin.yaml").write_bytes(b"a: 1\nb: caf\xe9\n")
    Path("wide.yaml").write_bytes("a: 1".encode("utf-16"))
    Path("data.yaml").write_bytes(b"a: 1\n" * 100_000)
    for name, said in {
        "quikstart.yaml": "no such file · did you mean quickstart.yaml?",
        "no/where.yaml": "the folder no does not exist",
        ".": "expected a YAML file, got a folder",
        "latin.yaml": "latin.yaml:2: not UTF-8: byte 0xe9",
        "wide.yaml": "got UTF-16 · save it as UTF-8",
        "data.yaml": "131,072 bytes",
        "a\0b.yaml": "cannot read file",
    }.items():
        with pytest.raises(ConfigError, match=r".") as caught:
            load_config(name)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_byte_order_mark_and_windows_line_ends(load: Callable[..., LoadedConfig], recipe_text: str) -> None:
    loaded = load("\ufeff" + recipe_text.replace("\n", "\r\n"))
    assert loaded.origins["training.output_dir"] == "x.yaml:8"


def test_plain_scalars_mean_what_people_mean() -> None:
    text = {"1e-4": 1e-4, "2.0e-4": 2e-4, "1E3": 1000.0, "1_000": 1000, "0x10": 16, ".5": 0.5, "-3": -3, "~": None}
    words = ("yes", "no", "on", "off", "010", "1:30", "2024-01-01", "1e", "e4", "0o7", "12e4567x", "truely")
    assert {key: scalar(key) for key in text} == text
    assert [scalar(word) for word in words] == list(words)


def test_merge_keys_and_their_lines() -> None:
    tree = parse("a: &a {p: 1, q: 2}\nb:\n  <<: *a\n  p: 3\n", "x.yaml")
    assert tree.values["b"] == {"p": 3, "q": 2}
    assert tree.place(("b", "p")).where == "x.yaml:4"


def test_tags_never_make_objects(problems: Callable[..., list[str]]) -> None:
    lines = problems("model: !!python/object/apply:os.system [ls]\n")
    assert any("x.yaml:1: model: the YAML tag" in line and "is not allowed" in line for line in lines)


def test_lines_are_those_of_editors(problems: Callable[..., list[str]], recipe_text: str) -> None:
    """YAML 1.1 breaks lines at U+0085 and U+2028 too; editors do not."""
    (line,) = problems(recipe_text + "logging: {run_name: 'a\u2028b\x85c'}\nsed: 1\n")
    assert line.startswith("x.yaml:10: sed: unknown key")
    (line,) = problems("# \u2028\u2028\x85\na: b: c\n")
    assert line.startswith("x.yaml:2: a second colon")


SHIPPED = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize("name", ["quickstart.yaml", "configs/quickstart.yaml", "./configs/quickstart.yaml"])
def test_shipped_recipes_are_found_from_anywhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_config(name)
    assert loaded.path == SHIPPED / "quickstart.yaml"
    assert loaded.run.depends_on == (str(SHIPPED / "quickstart_pretrain.yaml"),)


def test_shipped_recipes_of_an_installed_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "site-packages/halftune"
    (package / "configs").mkdir(parents=True)
    (package / "configs/quickstart.yaml").write_text((SHIPPED / "quickstart_pretrain.yaml").read_text())
    monkeypatch.setattr(shipped, "files", lambda name: package)
    assert load_config("configs/quickstart.yaml").path == package / "configs/quickstart.yaml"
    assert list(shipped.recipes()) == ["quickstart.yaml"]


def test_ones_own_recipe_comes_before_a_shipped_one(
    recipe_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart.yaml").write_text(recipe_text)
    assert load_config("quickstart.yaml").path == Path("quickstart.yaml")


@pytest.mark.parametrize("name", ["no/where.yaml", "mine.yaml", "/configs/quickstart.yaml", "configs/quick.yaml"])
def test_a_missing_recipe_leads_to_the_shipped_ones(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(name)
    assert caught.value.code == "config.file_not_found"
    remedy = caught.value.remedy or ""
    assert "halftune recipes" in remedy
    assert ("among them quickstart" in remedy) == ("quick" in name)
