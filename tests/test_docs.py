"""The documentation: links, the site's pages, short how-tos, every verb in the reference, a strict build."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from halftune.cli import VERBS
from halftune.config.load import load_config

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
TWO_SCREENS = 100  # lines, but for text that is printed by a command


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The ids of a page's headings, as GitHub and MkDocs make them of ours."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "")).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        if not aim.exists() or (anchor and anchor not in anchors(aim)):
            broken.append(target)
    assert not broken


def test_named_pages_exist() -> None:
    """Code, recipes and scripts name pages of the documentation in comments and messages."""
    missing = {}
    for folder in ("src", "kernels", "webui", "scripts", "configs", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".sh"):
                named = re.findall(r"\bdocs/[\w/-]+\.(?:md|png)", path.read_text(encoding="utf-8"))
                missing |= {one: name(path) for one in named if not (ROOT / one).exists()}
    assert not missing


def test_named_recipes_exist() -> None:
    missing = {}
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES):
        named = re.findall(r"\bconfigs/[\w/]+\.(?:yaml|py)", page.read_text(encoding="utf-8"))
        missing |= {one: name(page) for one in named if not (ROOT / one).exists() and one != "configs/x.yaml"}
    assert not missing


def test_every_page_is_in_the_site() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == [page.relative_to(DOCS).as_posix() for page in PAGES]


@pytest.mark.parametrize("page", sorted((DOCS / "how-to").glob("*.md")), ids=name)
def test_a_how_to_has_two_screens(page: Path) -> None:
    text = page.read_text()
    if page.name == "schedulers.md":  # it shows whole jobs
        text = FENCED.sub("", text)
    assert len(text.splitlines()) <= TWO_SCREENS


def test_every_verb_is_in_the_reference() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (DOCS / "reference/cli.md").read_text(), re.MULTILINE)
    assert set(VERBS) <= set(listed)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=name)
def test_recipes_in_the_text_are_valid(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every complete recipe of a page loads: its keys and values exist."""
    monkeypatch.chdir(tmp_path)
    Path("my_data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
        if {"model", "data", "training"} <= set(yaml.safe_load(block) or {}):
            Path("x.yaml").write_text(block)
            load_config("x.yaml", ["model.name_or_path=builtin:qwen2-tiny"])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "how-to/lora-one-gpu.html").exists()
