"""The lock files hold every package that halftune[all] needs, at the tested versions, with hashes."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def pins(text: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^\s+]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize("name", ["cpu", "cuda13"])
def test_a_lock_is_whole(name: str) -> None:
    text = (ROOT / "locks" / f"{name}.txt").read_text()
    locked, tested = pins(text), pins((ROOT / "constraints.txt").read_text())
    assert all(block.count("--hash=sha256:") for block in re.split(r"\n(?=\w)", text))
    assert {one: version for one, version in locked.items() if tested.get(one, version) != version} == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = Requirement(project["optional-dependencies"]["all"][0]).extras
    asked = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    waiting, seen = [Requirement(one) for one in asked], set[tuple[str, str]]()
    while waiting:
        one = waiting.pop()
        key = canonicalize_name(one.name)
        assert key in locked, key
        assert one.specifier.contains(locked[key], prereleases=True), str(one)
        for extra in ("", *one.extras):
            if (key, extra) not in seen:
                seen.add((key, extra))
                waiting += _needs(key, extra)


def _needs(name: str, extra: str) -> list[Requirement]:
    try:
        found = [Requirement(one) for one in requires(name) or ()]
    except PackageNotFoundError:  # an extra that the tests do without
        return []
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": extra})]
