"""The layers hold: a module imports only from layers below its own, or from its own package; no circle anywhere."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"halftune": ROOT / "src", "halftune_kernels": ROOT / "kernels", "halftune_webui": ROOT / "webui"}

FLOORS: dict[str, int] = {
    "halftune_kernels": 0,
    "halftune.core": 1,
    "halftune.config": 2,
    "halftune.convert": 3,
    "halftune.hardware": 3,
    "halftune.precision": 4,
    "halftune.attention": 4,
    "halftune.plan": 5,
    "halftune.data": 6,
    "halftune.optim": 6,
    "halftune.model": 7,
    "halftune.methods": 8,
    "halftune.verify": 8,
    "halftune.train": 9,
    "halftune.infer": 9,
    "halftune.export": 9,
    "halftune.serve": 10,
    "halftune.bench": 10,
    "halftune.evaluate": 11,
    "halftune.launch": 11,
    "halftune.doctor": 11,
    "halftune_webui": 11,
    "halftune.certify": 12,
    "halftune.cli": 13,
    "halftune.api": 14,
}
ENTRY_POINTS = {"halftune", "halftune.__main__"}  # the version, and `python -m halftune`
TORCH_FREE = (
    "halftune.core",
    "halftune.config",
    "halftune.convert",
    "halftune.hardware",
    "halftune.plan",
    "halftune.cli",
)
HEAVY = {"torch", "transformers", "accelerate", "peft", "datasets", "gradio", "triton"}
MOST_FILES = 17  # of a folder, __init__ included
NO_PACKAGE = ("kernels", "webui", "configs", "scripts")


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package, base in SOURCES.items():
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str | None:
    if module.startswith(("halftune_kernels", "halftune_webui")):
        return module.split(".")[0]
    room = ".".join(module.split(".")[:2])
    return room if room in FLOORS else None


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> list[tuple[int, str, bool]]:
    """(line, module, at module level) of every import, those inside functions included."""
    tree, known = tree_of(path), modules()
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append((node.lineno, whole if whole in known else str(node.module), id(node) in top))
    return found


def for_types(path: Path) -> set[int]:
    """Lines of the imports that only type checkers read."""
    blocks = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.If))
    only = (node for node in blocks if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    return {line for node in only for line in range(node.lineno, node.body[-1].end_lineno + 1)}


@cache
def arrows() -> dict[str, set[str]]:
    """Each module → the modules that it imports, at the top or inside a function."""
    known = modules()
    return {
        module: {
            target
            for line, target, _ in imports_of(path)
            if target in known and target != module and line not in for_types(path)
        }
        for module, path in known.items()
    }


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A circle of the graph; empty without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def parts_of(package: str) -> dict[str, set[str]]:
    """The modules and sub-packages of a package, each one node, and what they import of one another."""
    depth = package.count(".") + 2
    graph: dict[str, set[str]] = defaultdict(set)
    for module, targets in arrows().items():
        if module.startswith(f"{package}."):
            part = ".".join(module.split(".")[:depth])
            below = {".".join(one.split(".")[:depth]) for one in targets if one.startswith(f"{package}.")}
            graph[part] |= below - {part}
    return graph


@pytest.mark.parametrize("module", sorted(modules()))
def test_module_imports_only_from_below(module: str) -> None:
    known = modules()
    if module in ENTRY_POINTS:
        return
    room = room_of(module)
    assert room is not None, f"{module} stands in no room: give it a floor here"
    wrong = []
    for line, target, _ in imports_of(known[module]):
        if not target.startswith("halftune") or target in ENTRY_POINTS:
            continue
        other = room_of(target)
        assert other is not None, f"{module}:{line} imports {target}, which stands in no room"
        if other != room and FLOORS[other] >= FLOORS[room]:
            wrong.append(f"line {line}: {target} (floor {FLOORS[other]})")
    assert not wrong, f"{module} (floor {FLOORS[room]}) imports upwards or sideways: {wrong}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not circle(arrows())


@pytest.mark.parametrize("package", sorted(name for name, path in modules().items() if path.name == "__init__.py"))
def test_a_reader_walks_through_a_package_in_one_direction(package: str) -> None:
    assert not circle(parts_of(package)), "its parts import each other"


@pytest.mark.parametrize("package", sorted(name for name, path in modules().items() if path.name == "__init__.py"))
def test_a_package_can_be_surveyed(package: str) -> None:
    path = modules()[package]
    assert ast.get_docstring(tree_of(path)), f"{path}: say what comes in, what goes out, who may import it"
    assert len(list(path.parent.glob("*.py"))) <= MOST_FILES, f"{path.parent}: group its files"


def importers_of(package: str) -> set[str]:
    """The packages that import a package, and of its own top-level package the parts, as its docstring names them."""
    own = package.split(".")[:2] if package.count(".") > 1 else [""]
    found = set()
    for module, targets in arrows().items():
        parts = module.split(".")
        if parts[: package.count(".") + 1] == package.split(".") or not any(
            one == package or one.startswith(f"{package}.") for one in targets
        ):
            continue
        if parts[0] == "halftune_webui":
            inside = package.startswith("halftune_webui")
            found.add(".".join(parts[1 : package.count(".") + 1]) if inside else parts[0])
        else:
            found.add(".".join(parts[1:3]) if parts[:2] == own else parts[1])
    return found


@pytest.mark.parametrize("package", sorted(name for name, path in modules().items() if path.name == "__init__.py"))
def test_a_package_names_who_imports_it(package: str) -> None:
    said = ast.get_docstring(tree_of(modules()[package])) or ""
    _, named, line = said.partition("Imported by: ")
    if package.startswith("halftune_kernels") or package.count(".") == 0 or "`" not in line:
        return
    assert named
    assert set(re.findall(r"`([\w.]+)`", line)) == importers_of(package)


@pytest.mark.parametrize("module", [name for name in sorted(modules()) if name.startswith(TORCH_FREE)])
def test_lower_floors_and_command_line_start_without_torch(module: str) -> None:
    known = modules()
    heavy = [(line, target) for line, target, top in imports_of(known[module]) if top]
    assert not [pair for pair in heavy if pair[1].split(".")[0] in HEAVY]


@cache
def defined_in(path: Path) -> set[str]:
    """The names that a module defines; it is not imported, as it may be for an optional package."""
    found: set[str] = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name for one in node.names}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {one.id for one in targets if isinstance(one, ast.Name)}
    return found


def test_table_targets_exist_and_obey_the_floors() -> None:
    """Names in registries ("package.module:Name") are imports too."""
    known = modules()
    for module, path in known.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("halftune"):
                target, colon, name = node.value.partition(":")
                if not colon or not name.isidentifier():
                    continue
                assert target in known, f"{module}:{node.lineno} names {target}, which does not exist"
                assert name in defined_in(known[target]), f"{target} has no {name}"
                room, other = room_of(module), room_of(target)
                assert room is not None
                assert other is not None
                assert other == room or FLOORS[other] < FLOORS[room], f"{module} reaches up to {target}"


@pytest.mark.parametrize("folder", NO_PACKAGE)
def test_top_level_folders_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), f"an importable {folder!r} would shadow other packages"
