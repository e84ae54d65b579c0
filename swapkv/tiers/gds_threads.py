"""Threads that carry items of the GDS tier to their end, and one that ends items whose time is over.

A request to the disk or the device cannot be called off. So an item ends twice: its future at the deadline at the latest,
and the item itself, which gives memory and extent back, when its thread comes back from it.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError

import attrs

from swapkv.errors import DrainTimeout, PoolClosed, WouldBlock
from swapkv.tiers.gds_hands import Hands
from swapkv.tiers.gds_types import EndUnknown, Transfer
from swapkv.tiers.slab_header import ExtentHeader


@attrs.define(kw_only=True, eq=False)
class Item:
    """`run(item, hands)`: carries it out; it has ended on every way out but `EndUnknown`. `drop`: gives back what was taken
    for it, when it does not run. `what`: its name in errors."""

    what: str
    run: "Callable[[Item, Hands], ExtentHeader]"
    drop: Callable[[], None]
    end_ns: int = 0
    transfer: Transfer = attrs.field(factory=Transfer)
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def require_time(self) -> None:
        """Raises `DrainTimeout` once its future has ended before it: what it does now is for nobody."""
        if self.transfer.done():
            raise DrainTimeout(f"{self.what} came too late")

    def begin(self) -> bool:
        """Whether it is to run: it was neither cancelled nor did its time end. Called once, by the thread that has it."""
        with self.lock:
            return not self.transfer.done() and self.transfer.set_running_or_notify_cancel()

    def expire(self) -> None:
        """Its time is over."""
        with self.lock:
            under_way = self.transfer.running()
            words = (
                "is under way and going on: its memory is in use until the transfer is released"
                if under_way
                else "had not begun, and nothing has changed: try again"
            )
            self.settle(error=DrainTimeout(f"{self.what} at its deadline {words}"))

    def settle(self, header: ExtentHeader | None = None, error: BaseException | None = None) -> None:
        """End the future, if nothing has ended it yet."""
        try:
            if error is not None:
                self.transfer.set_exception(error)
            elif header is not None:
                self.transfer.set_result(header)
        except InvalidStateError:
            return


class GdsThreads:
    """A thread for each of `hands`, which it gives to the items that it runs.

    `deadline_ns`: from `submit` an item's future has so long. The threads are daemons: a device that never answers does
    not keep the process from ending.
    """

    def __init__(self, hands: Sequence[Hands], *, pending_max: int, deadline_ns: int) -> None:
        self._pending_max, self._deadline_ns = pending_max, deadline_ns
        self._pending = 0
        self._lost: list[Item] = []
        self._is_closed = False
        self._changed = threading.Condition()
        self._queue: deque[Item] = deque()
        self._watched: OrderedDict[Item, None] = OrderedDict()
        self._threads = [
            threading.Thread(target=self._serve, args=(hand,), name=f"swapkv-gds-{n}", daemon=True)
            for n, hand in enumerate(hands)
        ]
        self._watchman = threading.Thread(target=self._watch, name="swapkv-gds-deadlines", daemon=True)
        for thread in (*self._threads, self._watchman):
            thread.start()

    def submit(self, item: Item) -> Transfer:
        """Have a thread run it. Raises `WouldBlock` when `pending_max` items are not released yet, `PoolClosed`."""
        with self._changed:
            if self._is_closed:
                raise PoolClosed("the GDS tier is closed: open it again")
            if self._pending >= self._pending_max:
                raise WouldBlock(f"{self._pending} transfers are pending, pending_max={self._pending_max}: wait")
            item.end_ns = time.monotonic_ns() + self._deadline_ns
            self._pending += 1
            self._queue.append(item)
            self._watched[item] = None
            self._changed.notify_all()
        return item.transfer

    def close(self, deadline_ns: int) -> None:
        """Take nothing more, finish what was taken, join the threads. Idempotent.

        Raises `DrainTimeout` if they are not done `deadline_ns` from now, or if the end of a request is unknown.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        end_ns = time.monotonic_ns() + deadline_ns
        for thread in (*self._threads, self._watchman):
            thread.join(max(0, end_ns - time.monotonic_ns()) / 1e9)
        alive = sum(thread.is_alive() for thread in self._threads)
        if alive:
            raise DrainTimeout(
                f"{alive} threads wait for disk or device after {deadline_ns} ns: close again, or look at it"
            )
        if self._lost:
            raise DrainTimeout(
                f"the end of {len(self._lost)} requests is unknown, their memory stays in use: end the process"
            )

    def _serve(self, hand: Hands) -> None:
        while (item := self._next()) is not None:
            self._carry_out(item, hand)
            del item

    def _next(self) -> Item | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            return self._queue.popleft() if self._queue else None

    def _carry_out(self, item: Item, hand: Hands) -> None:
        header, error = None, None
        try:
            if item.begin():
                header = item.run(item, hand)
            else:
                item.drop()
        except EndUnknown as unknown:
            with self._changed:
                self._lost.append(item)
            item.settle(error=unknown)
            return
        except BaseException as failure:  # whatever it is, it is this item's
            error = failure
        self._release(item)
        item.settle(header, error)

    def _release(self, item: Item) -> None:
        with self._changed:
            self._pending -= 1
            self._watched.pop(item, None)
            self._changed.notify_all()
        item.transfer.released.set_result(None)

    def _expire(self, item: Item) -> None:
        """End an item's future. One that has not begun is taken out: all threads may hang."""
        item.expire()
        with self._changed:
            is_waiting = item in self._queue
            if is_waiting:
                self._queue.remove(item)
        if is_waiting:
            item.drop()
            self._release(item)

    def _watch(self) -> None:
        """Ends items in the order of their deadlines, which is that of their beginnings."""
        while True:
            with self._changed:
                item = next(iter(self._watched), None)
                if item is None and self._is_closed and self._pending == len(self._lost):
                    return
                left_ns = item.end_ns - time.monotonic_ns() if item else None
                if item is None or left_ns is None or left_ns > 0:
                    del item  # who sleeps refers to no memory
                    self._changed.wait(None if left_ns is None else left_ns / 1e9)
                    continue
                del self._watched[item]
            self._expire(item)
            del item
