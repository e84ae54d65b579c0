"""Pools for tests of what fails: a device whose copies wait and may raise, and a sequence that has something to lose."""

import threading
from collections.abc import Callable

import pytest

from swapkv import Pool
from swapkv.streams.host import HostDevice, Operation, Work
from tests.kit.writing import Writer

LONG_S = 60.0
SMALL = {"num_pages": 8, "host_bytes": 1 << 14}


class Faulty(HostDevice):
    """Copies wait for `go`; `fail` may raise in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.begun = threading.Event()
        self.fail: Callable[[Operation], None] = lambda operation: None

    def execute(self, operation: Operation) -> None:
        if operation.work in (Work.GATHER, Work.SCATTER):
            self.begun.set()
            assert self.go.wait(LONG_S)
            self.fail(operation)
        super().execute(operation)


async def one_on_the_device(pool: Pool, name: str = "a") -> Writer:
    writer = Writer(pool)
    pool.register(name, max_tokens=16)
    await writer.append({name: 9})
    return writer


async def raises(error: type[BaseException], call: Callable[[], object]) -> None:
    with pytest.raises(error):
        await call()  # type: ignore[misc]
