"""Streams that take their time, in an order that a seed chooses: what is read is always what was written.

Free pages and free host bytes are overwritten after every event, so reading too early, too late or in the wrong place
shows. Each kind of order that the executor keeps has a twin without it, which is caught.
"""

import threading
from collections.abc import Callable
from functools import partial
from random import Random

import anyio
import pytest

from swapkv import HostDevice, Restoring
from swapkv.executor import Executor
from swapkv.streams.host import Operation
from swapkv.transfers import Transfers
from tests.kit.late_traffic import run_late_async, run_late_stepped, run_pool_traffic

SEEDS = range(20)


class ShuffledDevice(HostDevice):
    """Real threads; of the operations that could run, a thread of the device lets one at a time, chosen by a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(name="shuffled")
        self._rng = Random(seed)
        self._changed = threading.Condition()
        self._waiting: list[Operation] = []
        self._chosen: Operation | None = None
        self._ended = False
        threading.Thread(target=self._choose, name="chooser", daemon=True).start()

    def execute(self, operation: Operation) -> None:
        with self._changed:
            self._waiting.append(operation)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._chosen is operation)
        try:
            super().execute(operation)
        finally:
            with self._changed:
                self._chosen = None
                self._changed.notify_all()

    def close(self, timeout_s: float) -> list[str]:
        stuck = super().close(timeout_s)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        return stuck

    def _choose(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or (self._waiting and self._chosen is None))
                if self._ended:
                    return
                self._chosen = self._waiting.pop(self._rng.randrange(len(self._waiting)))
                self._changed.notify_all()


@pytest.mark.parametrize("seed", SEEDS)
def test_stepped_pool_on_late_streams_reads_what_was_written(seed: int) -> None:
    run_late_stepped(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_pool_on_late_streams_reads_what_was_written(seed: int) -> None:
    run_late_async(seed)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("seed", range(4))
def test_pool_on_threads_in_any_order_reads_what_was_written(seed: int, backend: str) -> None:
    anyio.run(partial(run_pool_traffic, seed, 10, ShuffledDevice(seed)), backend=backend)


def copies_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Transfers.submit
    monkeypatch.setattr(Transfers, "submit", lambda self, copy, after: submit(self, copy, ()))


def no_fence_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executor, "_events", lambda self, fences: [])


def compute_streams_know_nothing_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executor, "_join", lambda self, stream: None)


def gates_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Restoring, "gate", lambda self, layer, stream: None)


@pytest.mark.parametrize(
    ("run", "without"),
    [
        (run_late_stepped, no_fence_is_waited_for),
        (run_late_stepped, copies_do_not_wait),
        (run_late_stepped, compute_streams_know_nothing_of_each_other),
        (run_late_async, no_fence_is_waited_for),
        (run_late_async, copies_do_not_wait),
        (run_late_async, compute_streams_know_nothing_of_each_other),
        (run_late_async, gates_are_open),
    ],
)
def test_late_streams_without_an_order_are_caught(
    run: Callable[[int], None], without: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch)
    assert any(reads_something_else(run, seed) for seed in SEEDS)


def reads_something_else(run: Callable[[int], None], seed: int) -> bool:
    try:
        run(seed)
    except AssertionError as error:
        return " reads " in str(error)
    return False
