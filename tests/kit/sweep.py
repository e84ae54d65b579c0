"""Cancelling a call at its first, second, third, … suspension, on asyncio and trio alike."""

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import anyio
import attrs


@attrs.define
class Outcome:
    """How a call ended that was cancelled at suspension `at`: `cancelled`, or it had returned before or in spite of it."""

    at: int
    suspensions: int
    cancelled: bool
    value: Any = None


class _CancelAt:
    """Awaits `inner`, and cancels `scope` when it is suspended for the `at`-th time."""

    def __init__(self, inner: Coroutine[Any, Any, Any], scope: anyio.CancelScope, at: int) -> None:
        self.suspensions = 0
        self._inner = inner
        self._scope = scope
        self._at = at

    def __await__(self) -> Generator[Any, Any, Any]:
        iterator = self._inner.__await__()
        resume: Callable[[], Any] = lambda: iterator.send(None)  # noqa: E731
        while True:
            try:
                trap = resume()
            except StopIteration as stop:
                return stop.value
            self.suspensions += 1
            if self.suspensions == self._at:
                self._scope.cancel()
            try:
                sent = yield trap
            except BaseException as error:
                resume = lambda error=error: iterator.throw(error)  # noqa: E731
            else:
                resume = lambda sent=sent: iterator.send(sent)  # noqa: E731


async def cancel_at(call: Callable[[], Coroutine[Any, Any, Any]], at: int) -> Outcome:
    """Run `call` in a scope that is cancelled at its `at`-th suspension."""
    outcome = Outcome(at=at, suspensions=0, cancelled=True)
    with anyio.CancelScope() as scope:
        awaitable = _CancelAt(call(), scope, at)
        try:
            outcome.value = await awaitable
            outcome.cancelled = False
        finally:
            outcome.suspensions = awaitable.suspensions
    return outcome


async def sweep(trial: Callable[[int], Awaitable[Outcome]], most: int = 50) -> int:
    """Run trials with the cancellation at suspension 1, 2, 3, … until one ends before it; returns how many there were."""
    for at in range(1, most):
        outcome = await trial(at)
        if outcome.suspensions < at:
            assert not outcome.cancelled
            return at
    raise AssertionError(f"the call is suspended at least {most} times")
