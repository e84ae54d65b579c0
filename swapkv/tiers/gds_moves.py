"""A payload's way between device memory and its extent: whole blocks by the GDS file, the last bytes through the host."""

from collections.abc import Callable

import torch

from swapkv.errors import ChecksumMismatch, DiskFault, DiskShort, ProtocolError
from swapkv.streams.base import Event, Stream
from swapkv.tiers.gds_hands import Hands
from swapkv.tiers.gds_types import GdsFile, GdsOrder, Span
from swapkv.tiers.slab import Slab
from swapkv.tiers.slab_header import BLOCK_BYTES, ExtentHeader

_Call = Callable[[Span, int, Stream], int]


class Moves:
    """Moves payloads of `slab` by `file`, on the calling thread. Memory is uint8 `[num_bytes]` of the device.

    When a call returns or raises nothing touches memory or extent any more, unless it raises `EndUnknown`. Raises
    `DiskFault` of the kind that happened, which the slab's usage counts, and `TransferError` if the device failed.
    """

    def __init__(self, slab: Slab, file: GdsFile) -> None:
        self._slab, self._file = slab, file

    def write(
        self, hands: Hands, memory: torch.Tensor, offset: int, *, checksum: bytes | None, after: Event | None
    ) -> bytes:
        """Write a payload to the extent's `offset`, zeros behind it up to the block's end. Returns its checksum."""
        hands.bind(self._file)
        whole = len(memory) // BLOCK_BYTES * BLOCK_BYTES
        if checksum is None:
            self._wait(after)
            checksum = hands.digest(memory)
        else:
            self._wait_before_request(hands, whole, after)
        self._move(self._file.write, hands, memory[:whole], offset)
        if whole < len(memory):
            self._slab.file.write(hands.fetch(memory[whole:]), offset + whole, hands.scratch)
        self._wait(after)
        return checksum

    def read(self, hands: Hands, memory: torch.Tensor, offset: int, *, after: Event | None) -> None:
        """Read a payload from the extent's `offset`."""
        hands.bind(self._file)
        whole = len(memory) // BLOCK_BYTES * BLOCK_BYTES
        self._wait_before_request(hands, whole, after)
        self._move(self._file.read, hands, memory[:whole], offset)
        if whole < len(memory):
            rest = hands.scratch.block[: len(memory) - whole]
            self._slab.file.read([rest], offset + whole, hands.scratch)
            hands.put(memory[whole:], rest)
        self._wait(after)

    def verify(self, hands: Hands, memory: torch.Tensor, header: ExtentHeader) -> None:
        """Raises `ChecksumMismatch` unless `memory` holds the payload that `header` was committed with."""
        if hands.digest(memory) != header.checksum:
            self._slab.file.count("checksum")
            raise ChecksumMismatch(f"{header.key}: the disk gave other bytes. Do not use them, run the tokens again")

    @staticmethod
    def _wait(after: Event | None) -> None:
        """Raises what `after` failed with."""
        if after is not None:
            after.wait()

    def _wait_before_request(self, hands: Hands, num_bytes: int, after: Event | None) -> None:
        """Have the request of `num_bytes` that comes next wait for `after`: on the device if that is possible, else here.

        A stream goes on behind an event that failed, so it is asked about once more when all is over.
        """
        if after is not None and num_bytes and self._file.order is GdsOrder.STREAM:
            try:
                return hands.io.wait(after)
            except ProtocolError:  # an event that the device knows nothing of
                pass
        return self._wait(after)

    def _move(self, call: _Call, hands: Hands, memory: torch.Tensor, offset: int) -> None:
        """`call` until all is moved: the disk may take a part only. What is no whole block is asked for again."""
        done = 0
        while done < len(memory):
            span = Span.of(memory[done:])
            try:
                moved = call(span, offset + done, hands.io)
            except DiskFault as fault:
                self._slab.file.count(fault.kind)
                raise
            moved = moved // BLOCK_BYTES * BLOCK_BYTES
            if moved < BLOCK_BYTES:
                self._slab.file.count("short")
                raise DiskShort(
                    f"{self._slab.path} at {offset}: {done} of {len(memory)} bytes, then no more. {DiskShort.__doc__}",
                    kind="short",
                )
            done += moved
