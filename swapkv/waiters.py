"""Calls that wait for news, and how a cancelled one ends."""

from collections.abc import Callable, Hashable
from typing import Any

import anyio
import anyio.lowlevel

from swapkv.bridge import postpone_cancellation


class Undone(Exception):  # noqa: N818
    """What was waited for was undone because the waiter was cancelled. Never leaves the library."""


class Waiter:
    """One call that waits. It ends with a value or an error, once."""

    def __init__(self, kind: str, key: Hashable) -> None:
        self.place = (kind, key)
        self.done = False
        self.error: BaseException | None = None
        self._value: Any = None
        self._event = anyio.Event()

    def end(self, value: object, error: BaseException | None = None) -> None:
        """The news has come."""
        if not self.done:
            self.done, self._value, self.error = True, value, error
            self._event.set()

    def result(self) -> Any:
        """The value; raises the error."""
        assert self.done
        if self.error is not None:
            raise self.error
        return self._value

    async def wait(self) -> Any:
        """Wait for the news. Cancellation leaves with nothing undone: see `settle`."""
        if self.done:
            await anyio.lowlevel.cancel_shielded_checkpoint()
        else:
            await self._event.wait()
        return self.result()

    async def ended(self) -> None:
        """Wait for the news, good or bad."""
        await self._event.wait()

    async def settle(self, undo: Callable[[], object]) -> Any:
        """Wait for the news; if cancelled, undo what was asked for and wait until that is done, then go on cancelling.

        Success in the very moment of the cancellation is success: the value is returned and the cancellation strikes
        at the task's next checkpoint. So a raise always means that things are as before.
        """
        try:
            return await self.wait()
        except anyio.get_cancelled_exc_class():
            if not self.done:
                undo()
                with anyio.CancelScope(shield=True):
                    await self.ended()
            if self.error is not None:
                raise
            postpone_cancellation()
            return self._value


class Waiters:
    """Every call that waits, by what it waits for."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[str, Hashable], list[Waiter]] = {}
        self._end: BaseException | None = None

    def add(self, kind: str, key: Hashable) -> Waiter:
        """A new waiter for the news `kind` of `key`."""
        waiter = Waiter(kind, key)
        if self._end is None:
            self._by_place.setdefault(waiter.place, []).append(waiter)
        else:
            waiter.end(None, self._end)
        return waiter

    def drop(self, waiter: Waiter) -> None:
        """Forget a waiter whose call never began."""
        waiting = self._by_place.get(waiter.place, [])
        if waiter in waiting:
            waiting.remove(waiter)
            if not waiting:
                del self._by_place[waiter.place]

    def end(self, kind: str, key: Hashable, value: object = None, error: BaseException | None = None) -> None:
        """The news has come: every call that waits for it goes on."""
        for waiter in self._by_place.pop((kind, key), []):
            waiter.end(value, error)

    def end_all(self, error: BaseException) -> None:
        """No news will ever come: every call raises `error`, those that come later included."""
        self._end = error
        for place in list(self._by_place):
            self.end(*place, error=error)
