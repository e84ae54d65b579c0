"""What the code may look like: which layer imports which, what the pure core may use, and how long things get."""

import ast
import inspect
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import swapkv
from swapkv.fsm.transitions import mermaid

ROOT = Path(swapkv.__file__).parent
MODULES = {
    ".".join((*path.relative_to(ROOT.parent).with_suffix("").parts,)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}

LAYERS = (
    ("ids", "errors", "config", "layout"),
    ("fsm", "budget"),
    ("streams", "tiers", "attention"),
    [
        "pool",
        "basepool",
        "closing",
        "driver",
        "stepdriver",
        "stepped",
        "executor",
        "forward",
        "sessions",
        "waiters",
        "bridge",
        "transfers",
        "statistics",
        "observer",
        "simulate",
        "ranks",
    ],
    ("cli", "demo", "doctor", "bench", "observe", "integrations", "schedulers"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
TOP = len(LAYERS)
CORE, OUTSIDE = 1, 2

IMPURE = frozenset(
    [
        "asyncio",
        "concurrent",
        "datetime",
        "io",
        "multiprocessing",
        "os",
        "pathlib",
        "queue",
        "random",
        "sched",
        "secrets",
        "select",
        "selectors",
        "signal",
        "socket",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "uuid",
    ]
)
BANNER = re.compile(r"[-=#*~_─━═]{4,}")


def level_of(module: str) -> int:
    """The layer of a module; the package itself, which names the public parts, is above all."""
    parts = module.split(".")
    return TOP if len(parts) == 1 else LEVEL.get(parts[1], TOP)


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in `tree`, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def own_imports(module: str) -> list[str]:
    return [name for name in imports(TREES[module]) if name.split(".")[0] == "swapkv"]


def names(*levels: int) -> list[str]:
    return [module for module in MODULES if level_of(module) in levels]


def test_every_module_belongs_to_a_layer() -> None:
    found = {module.split(".")[1] for module in MODULES if "." in module}
    assert found == LEVEL.keys(), "name the new module in its layer, or take the old one out"


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_go_down_only(module: str) -> None:
    up = [name for name in own_imports(module) if level_of(name) > level_of(module)]
    assert not up, f"{module} imports {up} of a higher layer"


@pytest.mark.parametrize("module", names(OUTSIDE))
def test_streams_tiers_and_attention_know_nothing_of_the_core(module: str) -> None:
    assert not [name for name in own_imports(module) if level_of(name) == CORE]


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("swapkv.budget")])
def test_budgets_know_nothing_of_the_state_machine(module: str) -> None:
    assert not [name for name in own_imports(module) if name.startswith("swapkv.fsm")]


@pytest.mark.parametrize("module", names(0, 1))
def test_core_module_uses_only_attrs_numpy_and_the_pure_part_of_the_standard_library(module: str) -> None:
    roots = {name.split(".")[0] for name in imports(TREES[module])} - {"swapkv", "attrs", "numpy"}
    assert roots <= sys.stdlib_module_names - IMPURE, f"{module} imports {sorted(roots)}"


def assigned(tree: ast.AST) -> Iterator[ast.expr]:
    """Everything that is assigned to in `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
            yield node.target


def test_state_of_a_chunk_is_assigned_in_the_core_only() -> None:
    found = {
        module
        for module in names(0, 1)
        for target in assigned(TREES[module])
        if isinstance(target, ast.Attribute) and target.attr == "state"
    }
    elsewhere = {
        module
        for module in MODULES
        for target in assigned(TREES[module])
        if isinstance(target, ast.Attribute) and ast.unparse(target).endswith("chunk.state")
    }
    assert found == elsewhere == {"swapkv.fsm.core"}


def test_transitions_are_built_in_one_file_and_taken_in_one() -> None:
    builders, takers = set(), set()
    for module, tree in TREES.items():
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        builders |= {module} if calls & {"Go", "Ignore", "Refuse"} else set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "swapkv.fsm.transitions":
                takers |= {module} if {"step", "TABLE"} & {alias.name for alias in node.names} else set()
    assert builders == {"swapkv.fsm.transitions"}
    assert takers == {"swapkv.fsm.core"}


@pytest.mark.parametrize("module", MODULES)
def test_module_is_short_and_so_are_its_functions(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) < 400
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 < 70, f"{module}:{node.name} is too long"


@pytest.mark.parametrize("module", MODULES)
def test_module_has_a_docstring_and_no_banner_comments(module: str) -> None:
    text = MODULES[module].read_text()
    assert not text or ast.get_docstring(TREES[module]), f"{module} says nothing of itself"
    with MODULES[module].open("rb") as file:
        comments = [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    assert not [comment for comment in comments if BANNER.search(comment.removeprefix("#"))]


def test_public_names_are_sorted_and_importable() -> None:
    assert swapkv.__all__ == sorted(swapkv.__all__)
    assert len(set(swapkv.__all__)) == len(swapkv.__all__)
    assert all(hasattr(swapkv, name) for name in swapkv.__all__)


@pytest.mark.parametrize("name", swapkv.__all__)
def test_public_class_or_function_has_a_docstring_of_its_own(name: str) -> None:
    thing = getattr(swapkv, name)
    if inspect.isclass(thing) or inspect.isroutine(thing):
        assert vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__


def test_readme_draws_the_machine_that_the_table_defines() -> None:
    blocks = re.findall(r"^```mermaid\n(.*?)\n```$", (ROOT.parent / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert mermaid() in blocks, "put the output of swapkv.fsm.transitions.mermaid() into README"
