"""Every error has a literal code of the catalogue, every code is used, and `halftune explain` knows it."""

from __future__ import annotations

import ast
import json
import pickle
import re
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from halftune import cli
from halftune.core.error_codes import catalogue
from halftune.core.errors import ConfigError, DataError, DtypeContractError, HalftuneError, TrainingError
from halftune.core.processes.failures import PeerLost
from halftune.core.status import StatusFile, read_status, reported
from halftune.train.signals.interrupt import Interrupted

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"[a-z]+(\.[a-z][a-z0-9_]*)")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> dict[Path, ast.Module]:
    files = [file for base in ("src", "webui") for file in sorted((ROOT / base).rglob("*.py"))]
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def below(name: str) -> dict[str, ast.ClassDef]:
    """The class and everything that inherits from it, by name."""
    classes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found, before = {each.name: each for each in classes if each.name == name}, 0
    while len(found) > before:
        before = len(found)
        found |= {each.name: each for each in classes if any(name_of(base) in found for base in each.bases)}
    return found


def takes_code(function: ast.AST) -> bool:
    return isinstance(function, Function) and any(each.arg == "code" for each in function.args.kwonlyargs)


@cache
def makes_errors() -> set[str]:
    """Names whose calls must say a code: errors but those that have one of their own, and what makes errors."""
    own = {
        name
        for name, node in below("HalftuneError").items()
        if any(isinstance(each, Function) and each.name == "__init__" and not takes_code(each) for each in node.body)
    }
    made = {each.name for tree in trees().values() for each in ast.walk(tree) if takes_code(each)}  # type: ignore[attr-defined]
    return (set(below("HalftuneError")) - own) | (made - {"__init__"}) | {"rule", "Violation"}


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, bool]]:
    """Every call, and whether the function around it is given a code."""
    waiting = [(tree, False)]
    while waiting:
        node, given = waiting.pop()
        if isinstance(node, ast.Call):
            yield node, given
        given = takes_code(node) if isinstance(node, Function) else given
        waiting += [(child, given) for child in ast.iter_child_nodes(node)]


def says_code(value: ast.expr | None, inside: bool) -> bool:
    """Whether a code is a literal of the catalogue, another error's, or what a function that makes errors is given."""
    if isinstance(value, ast.BoolOp):
        return all(says_code(each, inside) for each in value.values)
    if isinstance(value, ast.Constant):
        return value.value in catalogue()
    if isinstance(value, ast.Subscript):
        return isinstance(value.slice, ast.Constant) and value.slice.value == "code"
    if isinstance(value, ast.Name):
        return value.id == "code" and inside
    return isinstance(value, ast.Attribute) and value.attr == "code"


def wrong_calls(tree: ast.Module, file: str, makers: set[str], several: set[str]) -> list[str]:
    wrong = []
    for call, inside in calls(tree):
        maker = name_of(call.func)
        initial = maker == "__init__" and "super()" in ast.unparse(call.func)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if (initial and "code" not in given) or (not initial and maker not in makers):
            continue
        if maker == "Violation" and "code" not in given:
            continue  # it has the code of its rule
        if maker == "rule":
            given["code"] = call.args[0]
        elif maker.islower() and isinstance(call.func, ast.Name):
            continue  # those are methods
        if maker == "problem" and "tree" not in ast.unparse(call.func):
            continue  # Words.problem shows an error
        gathered = maker in several and not given and not isinstance(call.args[0], ast.Constant | ast.JoinedStr)
        if not gathered and not says_code(given.get("code"), inside):
            wrong.append(f"{file}:{call.lineno}: {ast.unparse(call)[:80]}")
    return wrong


def test_every_error_says_a_code_of_the_catalogue() -> None:
    makers, several = makes_errors(), set(below("Problems"))
    assert {"DataError", "PeerLost", "problem", "_refusal"} <= makers
    assert not makers & {"Interrupted", "NonFiniteStep", "BenchError"}
    found = [each for file, tree in trees().items() for each in wrong_calls(tree, str(file), makers, several)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "raise DataError('x')",
        "raise DataError('x', code='data.no_such_code')",
        "raise DataError('x', code=made)",
        "raise ConfigError(f'{x}')",
        "@rule('config.no_such_code', 'data.eval')\ndef found(run, context): ...",
        "tree.problem(('a',), 'x', 'y')",
        "class Own(DataError):\n    def __init__(self): super().__init__('x', code='own')",
    ],
)
def test_the_walk_sees_an_error_without_one(line: str) -> None:
    assert len(wrong_calls(ast.parse(line), "x.py", makes_errors(), set(below("Problems")))) == 1


def test_every_code_is_used_and_well_formed() -> None:
    words = {node.value for tree in trees().values() for node in ast.walk(tree)
             if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # fmt: skip
    assert set(catalogue()) <= words
    assert list(catalogue()) == sorted(catalogue())
    for code, entry in catalogue().items():
        assert CODE.fullmatch(code)
        assert entry.means.endswith(".")
        assert 0 < entry.fix.count(". ") + 1 <= 3


def test_an_error_needs_a_code() -> None:
    with pytest.raises(TypeError):
        HalftuneError("x")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        ConfigError("x")  # type: ignore[call-overload]


def test_an_error_that_gathers_others_has_the_first_ones_code() -> None:
    first, second = DataError("a", code="data.empty", remedy="b"), DataError("c\nd", code="data.too_large", where="e")
    both = ConfigError([first, second])
    assert both.code == "data.empty"
    assert both.report() == "a · b [data.empty]\ne: c [data.too_large]\nd"
    assert str(both) == "a · b\ne: c\nd"
    told = both.to_dict()
    assert (told["kind"], told["exit_code"], told["code"]) == ("ConfigError", 2, "data.empty")
    assert told["problems"][1] == {"code": "data.too_large", "what": "c\nd", "where": "e", "remedy": ""}


@pytest.mark.parametrize(
    "error",
    [
        DataError("x", code="data.empty", where="y"),
        PeerLost("x", code="launch.peer_lost", named=True),
        ConfigError([DtypeContractError("x", code="precision.promoted")]),
        Interrupted.before(signal.SIGTERM),
    ],
)
def test_an_error_goes_through_a_pipe(error: HalftuneError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert (str(back), back.code, vars(back).keys()) == (str(error), error.code, vars(error).keys())


def test_a_status_has_the_code(tmp_path: Path) -> None:
    with pytest.raises(TrainingError), reported(StatusFile(tmp_path / "status.json")):
        raise TrainingError("x", code="train.no_progress")
    status = read_status(tmp_path / "status.json")
    assert status is not None
    assert (status.error, status.code) == ("x", "train.no_progress")


def test_json_carries_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "x.yaml"
    recipe.write_text("colour: blue\nmodel: 7\n")
    for verb in (["plan"], ["data"], ["doctor"], ["launch"]):
        assert cli.run_verb(verb[0], ["--config", str(recipe), "--json"]) == 2
        out, err = capsys.readouterr()
        error = json.loads(out)["error"]
        assert {"config.unknown_key", "config.invalid_value", "config.missing_key"} == {
            each["code"] for each in error["problems"]
        }
        assert [line.rpartition(" ")[2] for line in err.splitlines()] == [
            f"[{each['code']}]" for each in error["problems"]
        ]


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_verb("explain", ["[config.unknown_key]"]) == 0
    entry = catalogue()["config.unknown_key"]
    said = capsys.readouterr().out
    assert all(part in said for part in ("config.unknown_key", entry.means, entry.fix))
    assert cli.run_verb("explain", ["config.unknown_kei"]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert "config.unknown_key" in said.err
    assert cli.run_verb("explain", []) == 0
    said = capsys.readouterr().out
    assert all(code in said for code in catalogue())
    assert cli.run_verb("explain", ["--json"]) == 0
    assert {entry["code"] for entry in json.loads(capsys.readouterr().out)} == set(catalogue())
