"""The order of the rooms in docs/design.md, and that no files of the package import each other in a circle."""

import ast
import re
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "stepsnet"
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
}
# of which type checkers and lazy attributes alone import what they name
FRONT = {"stepsnet", "stepsnet.__main__", "stepsnet.cli"}


def module_of(node, name, file):
    """What an import in a file is from: ``from ..a import b`` in stepsnet/c/d.py is from stepsnet.a."""
    package = (name if file.name == "__init__.py" else name.rpartition(".")[0]).split(".")
    base = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def imported(name, file):
    """The package's files that a file imports, wherever in it, but for those of type checkers."""
    skipped = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped |= set(chain.from_iterable(map(ast.walk, node.body)))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in FILES)
            continue
        if not isinstance(node, ast.ImportFrom):
            continue
        module = module_of(node, name, file)
        if module.partition(".")[0] != "stepsnet":
            continue
        for one in node.names:
            yield f"{module}.{one.name}" if f"{module}.{one.name}" in FILES else module


GRAPH = {name: set(imported(name, file)) - {name} for name, file in FILES.items() if name not in FRONT}


def rooms():
    """Those of docs/design.md, from the top, as lists of the modules that stand on one floor."""
    text = re.search(r"A room may import those.*?\n\n", (ROOT / "docs" / "design.md").read_text(), re.DOTALL)[0]
    for floor in re.split(r";\s+", text.partition(": ")[2]):
        yield [f"stepsnet.{name.removesuffix('.py')}" for name in re.findall(r"`([\w.]+)`", floor)]


def test_no_circle():
    list(TopologicalSorter(GRAPH).static_order())


def test_no_task_imports_another():
    def task(name):
        return name.split(".")[2] if name.startswith("stepsnet.tasks.") else None

    tasks = {task(name) for name, file in FILES.items() if task(name) and file.name == "__init__.py"}
    assert tasks == {"classification", "detection", "segmentation", "language"}
    for name, others in GRAPH.items():
        if task(name) in tasks:
            assert {task(other) for other in others} & tasks <= {task(name)}, name


def test_imports_run_downwards():
    floor_of = {room: number for number, floor in enumerate(rooms()) for room in floor}

    def floor(name):
        return next((number for room, number in floor_of.items() if f"{name}.".startswith(f"{room}.")), None)

    assert [room for room in floor_of if room not in FILES] == []
    assert [name for name in GRAPH if floor(name) is None] == []  # each has its place
    upwards = [
        f"{name} imports {other}"
        for name, others in GRAPH.items()
        for other in others - FRONT
        if floor(other) < floor(name)
    ]
    assert not upwards


def listed(file):
    """The names in a file's ``__all__``; None where it has none."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value)) if isinstance(node.value, ast.List) else None
    return None


def test_what_others_import_is_listed():
    """``__all__`` says what of a file is for others, so a name that is not in it can be changed there alone."""
    exported = {name: listed(file) for name, file in FILES.items()}
    for name, file in FILES.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                module = module_of(node, name, file)
                names = {one.name for one in node.names if f"{module}.{one.name}" not in FILES}
                if exported.get(module) is not None:
                    assert names <= exported[module], (name, module, names - exported[module])
    assert sum(names is not None for names in exported.values()) > 150
