"""Nothing in this repository can run what a data file, a config or a checkpoint says: no pickle, no eval, no shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("src", "kernels", "webui", "scripts")
FILES = sorted(path for part in OURS for path in (ROOT / part).rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
CALLS = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "torch.load",
    "numpy.load",
    "np.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.hub.load",
}
SAFE_LOADERS = {
    "SafeLoader",
    "CSafeLoader",
    "BaseLoader",
    "CBaseLoader",
}  # a BaseLoader makes text only


def name_of(node: ast.AST) -> str:
    """``a.b.c`` of a name or attribute; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return ""


def breaches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that the policy forbids."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((node.lineno, name) for name in names if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in _of_call(node))


def _of_call(call: ast.Call) -> Iterator[str]:
    name, keywords = name_of(call.func), {keyword.arg: keyword.value for keyword in call.keywords}
    if name in ("np.load", "numpy.load"):
        pickles = keywords.get("allow_pickle")
        if pickles is not None and not (isinstance(pickles, ast.Constant) and pickles.value is False):
            yield f"{name}(allow_pickle=…)"
    elif name in ("yaml.load", "yaml.load_all"):
        loader = keywords.get("Loader", call.args[1] if len(call.args) > 1 else None)
        if loader is None or name_of(loader).split(".")[-1] not in SAFE_LOADERS:
            yield f"{name} without a safe loader"
    elif name in CALLS:
        yield name
    for key in ("shell", "trust_remote_code"):
        value = keywords.get(key)
        if isinstance(value, ast.Constant) and value.value is True:
            yield f"{key}=True"
    unsafe = keywords.get("use_safetensors")
    if name.endswith("from_pretrained") and isinstance(unsafe, ast.Constant) and unsafe.value is False:
        yield "use_safetensors=False"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file(path: Path) -> None:
    found = list(breaches(ast.parse(path.read_text(encoding="utf-8"))))
    assert not found, "\n".join(f"{path}:{line}: {what}" for line, what in found)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from dill import loads",
        "torch.load('x', weights_only=True)",
        "np.load('x', allow_pickle=True)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "subprocess.run(line, shell=True)",
        "eval('1')",
        "M.from_pretrained('x', trust_remote_code=True)",
        "M.from_pretrained('x', use_safetensors=False)",
    ],
)
def test_the_judge_finds_it(code: str) -> None:
    assert list(breaches(ast.parse(code)))


@pytest.mark.parametrize("code", ["yaml.load(t, Loader=yaml.SafeLoader)", "np.load('x')", "model.eval()", "'pickle'"])
def test_the_judge_lets_it_pass(code: str) -> None:
    assert not list(breaches(ast.parse(code)))
