"""Takes one guard out of the core: a piece of one function's source is replaced, and put back afterwards."""

import __future__

import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType

import attrs


@attrs.frozen
class Edit:
    """In the source of the function at `place` (`fsm.copies:_submit`, `fsm.core:SwapCore.wanted`), `old` → `new`.

    `old` must occur exactly once: a guard that has moved makes its canary fail loudly.
    """

    place: str
    old: str
    new: str


@attrs.frozen
class Canary:
    """A core, or a driver, without one guard. `guard`: what it loses. `catcher`: what catches it soonest, a world or a
    run or test of `catchers`.
    """

    name: str
    guard: str
    catcher: str
    edits: tuple[Edit, ...]


def canary(name: str, guard: str, catcher: str, place: str, old: str, new: str) -> Canary:
    """A canary of one edit."""
    return Canary(name, guard, catcher, (Edit(place, old, new),))


@contextmanager
def applied(edits: tuple[Edit, ...]) -> Iterator[None]:
    """Run with all `edits` in place. Every reference to a function sees them: its code is exchanged, not the name."""
    before: list[tuple[FunctionType, CodeType]] = []
    try:
        for edit in edits:
            function = _find(edit.place)
            code = _edited(function, edit)
            before.append((function, function.__code__))
            function.__code__ = code
        yield
    finally:
        for function, code in reversed(before):
            function.__code__ = code


def _find(place: str) -> FunctionType:
    module_name, _, name = place.partition(":")
    found: object = importlib.import_module(f"swapkv.{module_name}")
    for part in name.split("."):
        found = getattr(found, part)
    if isinstance(found, property):
        found = found.fget
    assert callable(found), place
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType), place
    return found


def _edited(function: FunctionType, edit: Edit) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    count = source.count(edit.old)
    assert count == 1, f"{edit.place} contains {edit.old!r} {count} times: adapt the canary"
    source = source.replace(edit.old, edit.new)
    flags = __future__.annotations.compiler_flag
    scope: dict[str, Callable[..., object] | property] = dict(function.__globals__)
    exec(compile(source, f"<{edit.place} without its guard>", "exec", flags, dont_inherit=True), scope)
    made = scope[function.__name__]
    if isinstance(made, property):
        assert made.fget is not None
        made = made.fget
    made = inspect.unwrap(made)
    assert isinstance(made, FunctionType)
    return made.__code__
