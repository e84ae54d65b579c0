"""Many reads or writes at once: an outcome for each, and a deadline for all."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from swapkv.errors import DrainTimeout, ProtocolError, SwapError
from swapkv.tiers.slab_header import ChunkKey, ExtentHeader
from swapkv.tiers.slab_types import Buffer, Outcome, Read, Write

ItemT = TypeVar("ItemT", Read, Write)


def bytes_of(buffer: Buffer) -> memoryview:
    """`buffer` as uint8 `[num_bytes]`, no copy. Raises `ProtocolError` if it is empty or not in one piece."""
    view = memoryview(buffer)
    if not view.c_contiguous or view.nbytes < 1:
        raise ProtocolError(f"a buffer of shape {view.shape}: pass one that is contiguous and has at least 1 byte")
    return view.cast("B")


def run_batch(
    items: Sequence[ItemT], begin: Callable[[ItemT], "Future[ExtentHeader]"], deadline_ns: int
) -> list[Outcome]:
    """`begin` each of `items`; their outcomes, in order, `deadline_ns` from now at the latest."""
    end_ns = time.monotonic_ns() + deadline_ns
    begun: list[tuple[ChunkKey, Future[ExtentHeader] | SwapError]] = []
    for item in items:
        try:
            begun.append((item.key, begin(item)))
        except SwapError as error:
            begun.append((item.key, error))
    return [
        Outcome(key=key, error=what) if isinstance(what, SwapError) else _outcome(key, what, end_ns)
        for key, what in begun
    ]


def _outcome(key: ChunkKey, future: "Future[ExtentHeader]", end_ns: int) -> Outcome:
    wait([future], max(0, end_ns - time.monotonic_ns()) / 1e9)
    if future.cancel() or future.cancelled():
        return Outcome(key=key, error=DrainTimeout(f"{key}: not begun at the deadline, nothing changed: try again"))
    if not future.done():
        return Outcome(
            key=key, error=DrainTimeout(f"{key}: under way at the deadline and going on: its buffer is in use")
        )
    error = future.exception()
    if error is None:
        return Outcome(key=key, header=future.result())
    if isinstance(error, Exception):
        return Outcome(key=key, error=error)
    raise error
