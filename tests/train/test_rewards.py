"""Rewards that come with halftune; several at once; the limits of code that answers hold."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from patience import LIMIT, until

from halftune.config.load import load_config
from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.rewards import REWARDS
from halftune.core.errors import ConfigError, TrainingError
from halftune.train.rewards import REWARD_FUNCTIONS, Rewards, sandbox, sandboxed
from halftune.train.rewards.passes_tests import run_python  # before a test replaces the sandbox's own
from halftune.train.rewards.sandbox import hides_files, isolates

ROOT = Path(__file__).resolve().parent.parent.parent


def rewards_of(*sections: dict[str, Any], **more: Any) -> Rewards:
    return Rewards(GrpoMethod.model_validate({"type": "grpo", "rewards": list(sections), **more}))


def given(rewards: Rewards, completions: list[str], ids: Any = None, **columns: Any) -> list[list[float]]:
    rows = [{name: value[i] for name, value in columns.items()} for i in range(len(completions))]
    return rewards(["p"] * len(rows), completions, ids or [[1]] * len(rows), rows, "rows").tolist()


def test_the_table_and_the_section_name_the_same_functions() -> None:
    assert set(REWARDS) == set(REWARD_FUNCTIONS)


def test_async_functions_run_at_the_same_time_and_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "async def nothing(completions, **_):\n    return [None] * len(completions)\n"
        "async def fails(**_):\n    raise KeyError('x')\n"
    )
    (begun := tmp_path / "begun").mkdir()
    mine, slow = ({"file": str(tmp_path / name)} for name in ("mine.py", "slow.py"))
    names = [{"function": "lengths", **slow}, {"function": "exact_answer"}, {"function": "nothing", **mine}]
    (tmp_path / "slow.py").write_text(
        "import asyncio, pathlib, uuid\n"
        f"begun = pathlib.Path({str(begun)!r})\n"
        "async def slow(one):\n"
        "    (begun / uuid.uuid4().hex).touch()\n"
        f"    async with asyncio.timeout({LIMIT}):\n"
        "        while len(list(begun.iterdir())) < 4:  # both answers by both functions\n"
        "            await asyncio.sleep(0.01)\n"
        "    return float(len(one))\n"
        "async def lengths(completions, **_):\n    return await asyncio.gather(*map(slow, completions))\n"
    )
    rewards = rewards_of(*names, names[0])
    found = given(rewards, ["a", "bb"], answer=["a", "c"])
    assert found[0] == found[3] == [1.0, 2.0]
    assert found[1] == [1.0, 0.0]
    assert all(map(math.isnan, found[2]))
    assert given(rewards, ["ccc"], answer=["a"])[0] == [3.0]  # the same loop again

    async def notebook() -> list[float]:
        return given(rewards, ["ccc"], answer=["a"])[0]

    with ThreadPoolExecutor(1) as another:  # a browser's tests leave a loop running in this thread
        assert another.submit(asyncio.run, notebook()).result() == [3.0]
    with pytest.raises(TrainingError) as error:
        given(rewards_of({"function": "fails", **mine}), ["a"])
    assert error.value.code == "train.reward_failed"


def test_the_overlong_penalty_is_that_of_trl() -> None:
    theirs_of = pytest.importorskip("trl.rewards").get_soft_overlong_punishment
    ids = [[0] * length for length in range(1, 41)]
    ours = given(rewards_of({"function": "overlong", "soft_tokens": 12}, max_completion_length=32), ["a"] * 40, ids)
    theirs = theirs_of(32, 12)(ids)
    assert ours[0] == pytest.approx([-1.0 if one is None else one for one in theirs])
    assert min(ours[0]) == -1
    assert max(ours[0]) == 0


def test_equal_expressions_are_the_same_answer() -> None:
    pytest.importorskip("math_verify")
    rewards = rewards_of({"function": "same_maths"})
    answers = [r"So it is $\frac{2}{4}$.", "The answer is 0.5", r"$x^2+2x+1$", r"\boxed{(x+2)^2}", "It is 7", "words"]
    found = given(rewards, answers, answer=["1/2", r"$\frac12$", "(x+1)^2", "(x+1)^2", "", "3"])[0]
    assert found[:4] == [1.0, 1.0, 1.0, 0.0]
    assert math.isnan(found[4])
    assert found[5] == 0.0
    assert all(map(math.isnan, given(rewards, ["None", "nan"], answer=[None, math.nan])[0]))


CODE = {
    "right": ("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", 1.0),
    "half right": ("```python\ndef add(a, b):\n    return a + abs(b)\n```", 0.5),
    "no block": ("def add(a, b): return a + b", 1.0),
    "no code": ("I do not know.", 0.0),
    "leaves early": ("import os\ndef add(a, b):\n    os._exit(0)", 0.0),
    "replaces exec": ("import builtins\nexec = print = builtins.exec = lambda *_: None\nadd = max", 0.0),
    "prints results": ("print('0\\n1\\nok')\ndef add(a, b):\n    raise SystemExit", 0.0),
}


def test_code_is_run_against_its_tests() -> None:
    rewards = rewards_of({"function": "passes_tests", "run_code": True, "seconds": LIMIT})
    tests = ["assert add(1, 2) == 3", "assert add(1, -2) == -1"]
    found = given(rewards, [one for one, _ in CODE.values()], tests=[tests] * len(CODE))[0]
    assert dict(zip(CODE, found, strict=True)) == {name: share for name, (_, share) in CODE.items()}
    assert given(rewards, ["x = 1", "x = 1"], tests=["assert x == 1", "assert x == 2"])[0] == [1.0, 0.0]
    with pytest.raises(TrainingError) as error:
        given(rewards, ["x = 1"], tests=[{"inputs": ["1"], "outputs": ["2"]}])
    assert error.value.code == "train.reward_failed"


class Impatient(subprocess.Popen):
    """A program whose time is over when it has printed something; ``asked`` keeps how long it would have had."""

    asked: ClassVar[list[float]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.printed = options["stdout"].fileno()
        super().__init__(*arguments, **options)

    def communicate(self, input: Any = None, timeout: float | None = None) -> Any:
        def has_printed() -> bool:
            nonlocal input
            given, input = input, None  # once
            with suppress(subprocess.TimeoutExpired):
                super(Impatient, self).communicate(given, 0.05)
            return os.fstat(self.printed).st_size > 0

        self.asked.append(timeout or 0.0)
        until(has_printed, "the program prints")
        return super().communicate(None, 0.0)


def test_programs_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setattr(sandbox, "_START", LIMIT)
    assert run_python("print(1, flush=True)\nwhile True: pass", 1, 256) == "1\n"
    assert run_python("print(1, flush=True)\nx = bytearray(10**9)\nprint(2)", LIMIT, 256) == "1\n"
    assert len(run_python("print('a' * 10**7)", LIMIT, 256)) <= 1 << 20
    assert run_python("import os\nprint(os.environ.get('SECRET'), os.listdir())", LIMIT, 256) == "None []\n"
    deep = "import os\nfor _ in range(1100):\n    os.mkdir('a')\n    os.chdir('a')\nprint(4)"
    assert run_python(deep, LIMIT, 256) == "4\n"  # deeper than Python removes
    left = tmp_path / "left"
    child = f"import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(1)\n    open({str(left)!r}, 'w')\n"
    assert run_python(f"{child}print(3)", LIMIT, 256) == "3\n"
    if not isolates():
        pytest.skip("this system does not isolate programs")
    connect = "import socket\nprint(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect_ex(('192.0.2.1', 9)))"
    assert run_python(connect, LIMIT, 256) == f"{errno.ENETUNREACH}\n"
    time.sleep(1.2)  # in which one that is left would write
    assert not left.exists()  # processes end with the program that started them


def test_a_program_that_waits_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.subprocess, "Popen", Impatient)
    Impatient.asked.clear()
    assert run_python(f"import time\nprint(2, flush=True)\ntime.sleep({LIMIT})", 0.5, 256) == "2\n"
    assert Impatient.asked == [2 * 0.5 + sandbox._START], "twice the CPU time, and the start"


def test_programs_do_not_outlive_their_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isolates():
        pytest.skip("this system does not isolate programs")
    monkeypatch.setattr(sandbox.subprocess, "Popen", Impatient)
    left, seconds = tmp_path / "left", LIMIT + os.getpid() / 2**32  # which no other test says
    loose = "import ctypes, os, time\nctypes.CDLL(None).prctl(1, 0)\nos.setsid()\nprint(1, flush=True)\n"
    assert run_python(f"{loose}time.sleep(2)\nopen({str(left)!r}, 'w')", seconds, 256) == "1\n"
    own = f"sandboxed.py\0{seconds}\0".encode()
    until(lambda: not any(own in _read(path) for path in Path("/proc").glob("[0-9]*/cmdline")), "the program's end")
    assert not left.exists(), "it was killed, and did not end by itself"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def test_programs_write_to_their_own_small_folder_only(tmp_path: Path) -> None:
    if not isolates():
        pytest.skip("this system does not isolate programs")
    kept = tmp_path / "kept"
    kept.write_text("kept")
    each = [f"open({str(kept)!r}, 'w')", f"os.chmod({str(kept)!r}, 0)", f"os.remove({str(kept)!r})"]
    tries = "".join(f"try:\n    {one}\n    print('done')\nexcept OSError:\n    pass\n" for one in each)
    assert run_python(f"import os\n{tries}open('own', 'w').write('1')\nprint(open('own').read())", LIMIT, 256) == "1\n"
    assert kept.read_text() == "kept"
    fill = "for n in range(200):\n    open(f'f{n}', 'wb').write(bytes(1 << 20))\n    print(n, flush=True)"
    assert len(run_python(fill, LIMIT, 256).splitlines()) <= 64


def test_programs_do_not_see_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    if not isolates():
        pytest.skip("this system does not isolate programs")
    look = "import os\nfound = [one for one in os.listdir('/proc') if one.isdigit()]\n"
    look += "for one in found:\n    try:\n        print(open(f'/proc/{one}/environ').read())\n"
    look += "    except OSError:\n        pass\n"
    monkeypatch.setenv("SECRET_KEY", "hidden")
    assert "SECRET_KEY" not in run_python(look, LIMIT, 256)


def test_programs_do_not_read_the_users_files(tmp_path: Path) -> None:
    if not hides_files():
        pytest.skip("this system has no Landlock")
    (tmp_path / "key").write_text("secret")
    tries = [f"open({str(tmp_path / 'key')!r}).read()", f"os.listdir({str(tmp_path)!r})", f"os.listdir({str(ROOT)!r})"]
    tries += [f"os.listdir({str(one)!r})" for one in (Path.home(),) if one.is_dir()]
    tries += ["open('/etc/passwd').read()"]
    code = "import os, ssl, decimal, json, zoneinfo, numpy\n"
    code += "".join(f"try:\n    print({one})\nexcept PermissionError:\n    pass\n" for one in tries)
    assert run_python(
        f"{code}print(numpy.arange(3).sum(), open('own', 'w').write('1'), os.listdir())", LIMIT, 1024
    ) == ("3 1 ['own']\n")


@pytest.mark.parametrize(
    ("release", "limited"), [("4.18.0-553.el8_10.x86_64", False), ("5.14-rc1", True), ("6.8", True)]
)
def test_processes_are_counted_where_the_kernel_counts_those_of_a_namespace(
    monkeypatch: pytest.MonkeyPatch, release: str, limited: bool
) -> None:
    monkeypatch.setattr(sandboxed.os, "uname", lambda: SimpleNamespace(release=release))
    assert (sandboxed._kernel() >= (5, 14)) is limited


def test_programs_that_do_not_run_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "run_python", lambda *_: "")
    sandbox._found.cache_clear()
    with pytest.raises(TrainingError) as error:
        rewards_of({"function": "passes_tests", "run_code": True})
    sandbox._found.cache_clear()
    assert error.value.code == "train.reward_failed"


def test_deep_folders_of_a_program_do_not_end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "import os\nfor _ in range(3000):\n    os.mkdir('a')\n    os.chdir('a')\nprint(1)"
    monkeypatch.setattr(sandbox, "_CHILD", Path(__file__).with_name("runs_its_input.py"))  # without namespaces
    assert run_python(deep, 2, 256) == "1\n"


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"function": "passes_tests"}, "config.code_not_allowed"),
        ({"function": "overlong", "soft_tokens": 17}, "config.out_of_range"),
    ],
)
def test_what_a_reward_needs(asked: dict[str, Any], code: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(ROOT / "configs" / "tiny" / "grpo.yaml", [f"method.rewards={json.dumps([asked])}"])
    found = error.value.problems or (error.value,)
    assert [one.code for one in found] == [code]
