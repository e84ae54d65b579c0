"""Chunks between device memory and the slab's file, by kvikio: directly where cuFile can, else through its own buffers.

The file is a slab's, and stays one: `reserve`, `begin_commit`, `abandon` and `pin` of `Slab` decide what is where, so all
that holds for a slab after a crash holds here, and what either wrote the other reads. `GdsSlab` has the calls of `Slab`
(`begin_write`, `begin_read`, `begin_delete`, `write_batch`, `read_batch`, `lookup`, `chunks`, `usage`, `close`) with
the same errors; an item names device memory instead of a buffer, may wait for an event (`after`), and ends at a deadline.
Whoever joins it to a pool takes a chunk that is on the device here, and one that is in host memory to `slab`.

Whole blocks go by kvikio; the last, incomplete one goes through pinned memory and the slab's own file, so that every
request is of whole blocks and what is behind a payload is zeros, as the slab writes it.

Checksums. The header of a chunk holds the XXH3-128 of its payload, which a scan and every read of the slab compare, so a
chunk without one cannot be stored. A hash needs the bytes in host memory. They are copied there for it (D2H, through
`stage_bytes` of pinned memory), unless the caller has hashed them already; the payload itself does not come from that copy.
A read copies back what has come and hashes it, unless `PayloadCheck.NEVER` is asked for; the header on the disk is not read
again. So on the direct path the link carries a chunk twice; what is saved is host memory for it and its bandwidth.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch

from swapkv.errors import ProtocolError
from swapkv.streams.base import Device
from swapkv.tiers.gds_hands import Hands, flat
from swapkv.tiers.gds_moves import Moves
from swapkv.tiers.gds_open import OpenFile, Opening, kvikio_files
from swapkv.tiers.gds_threads import GdsThreads, Item
from swapkv.tiers.gds_types import DeviceRead, DeviceWrite, EndUnknown, GdsOptions, PayloadCheck, Span, Transfer
from swapkv.tiers.slab import Slab
from swapkv.tiers.slab_batch import run_batch
from swapkv.tiers.slab_header import ChunkKey, ExtentHeader
from swapkv.tiers.slab_types import Outcome, SlabUsage, Stored

CHECKSUM_BYTES = 16


class GdsSlab:
    """`slab`, for memory of `device`; it is this object's from now on, and closed with it. Opening blocks, for a probe.

    `report`: the path that is taken, and why not a better one. `files`: what could be taken instead of kvikio's, best
    first. Errors of opening, after which the slab is the caller's: `ImportError` (names the extra), `ProtocolError`
    (no device of CUDA), `TransferError` (no way passes the probe), `DrainTimeout` (one hangs: end the process).
    `begin_…` calls do not block; their transfers end on threads of this object. Errors of `begin_…`, at once, nothing
    changed: those of `Slab`. Errors of transfers: `DiskFault` of the kind that happened ("cufile": cuFile's own),
    `TransferError` of the device; a failed write stores nothing and the chunk's earlier generation stays.
    `ChecksumMismatch`: do not use the memory, run the tokens again. `DrainTimeout`: not over at its deadline. The memory is
    in use until `transfer.released`, and nobody gets the extent until then. A write that is late is not committed, unless
    its commit was under way: `lookup` tells. `EndUnknown`: as that, for good.
    Close it before the device.
    """

    def __init__(
        self, slab: Slab, device: Device, *, options: GdsOptions | None = None, files: Iterable[OpenFile] | None = None
    ) -> None:
        self.slab, self.options = slab, options or GdsOptions()
        files = kvikio_files(slab, device, self.options) if files is None else files
        hands = [Hands(device, number, self.options.stage_bytes) for number in range(self.options.depth)]
        self.file, self.report = Opening(slab, device, hands[0], self.options).best_of(files)
        self._moves = Moves(slab, self.file)
        self._threads = GdsThreads(hands, pending_max=self.options.pending_max, deadline_ns=self.options.deadline_ns)
        self._is_closed = False

    def lookup(self, key: ChunkKey) -> ExtentHeader | None:
        """See `Slab.lookup`."""
        return self.slab.lookup(key)

    def chunks(self) -> list[ExtentHeader]:
        """See `Slab.chunks`."""
        return self.slab.chunks()

    def usage(self) -> SlabUsage:
        """See `Slab.usage`; its `io_path` is that of headers and last blocks, `report` has the payloads'."""
        return self.slab.usage()

    def begin_write(self, write: DeviceWrite) -> Transfer:
        """Store a chunk; done means committed, as `Slab.begin_write`."""
        span = self._span_of(write.memory)
        if write.checksum is not None and len(write.checksum) != CHECKSUM_BYTES:
            raise ProtocolError(f"a checksum of {len(write.checksum)} bytes: pass the 16 of XXH3-128, or None")
        reserved = self.slab.reserve(write.key, write.generation, span.num_bytes)
        item = Item(
            what=f"writing {write.key}",
            run=lambda item, hands: self._write(item, hands, write, reserved),
            drop=lambda: self.slab.abandon(reserved),
        )
        return self._submit(item)

    def begin_read(self, read: DeviceRead) -> Transfer:
        """Fetch a chunk, as `Slab.begin_read`; with `PayloadCheck.ALWAYS` its bytes are compared with what was committed."""
        span = self._span_of(read.into)
        stored = self.slab.pin(read.key, read.generation)
        item = Item(
            what=f"reading {read.key}",
            run=lambda _, hands: self._read(hands, read, stored),
            drop=lambda: self.slab.unpin(stored),
        )
        if span.num_bytes != stored.header.num_bytes:
            item.drop()
            raise ProtocolError(f"{read.key} has {stored.header.num_bytes} bytes, the memory has {span.num_bytes}")
        return self._submit(item)

    def begin_delete(self, key: ChunkKey) -> "Future[None]":
        """See `Slab.begin_delete`: it waits for transfers that read the chunk."""
        return self.slab.begin_delete(key)

    def write_batch(self, writes: Sequence[DeviceWrite], *, deadline_ns: int) -> list[Outcome]:
        """Store chunks; an outcome for each, in order. See `Slab.write_batch`. Blocks, `deadline_ns` at most."""
        return run_batch(writes, self.begin_write, deadline_ns)  # type: ignore[type-var]

    def read_batch(self, reads: Sequence[DeviceRead], *, deadline_ns: int) -> list[Outcome]:
        """Fetch chunks; as `write_batch`."""
        return run_batch(reads, self.begin_read, deadline_ns)  # type: ignore[type-var]

    def close(self) -> None:
        """Take nothing more, finish what was begun, join the threads, close the slab. Idempotent.

        Raises `DrainTimeout` after `deadline_ns`; the file stays open and locked then, for requests are on their way to it:
        close again.
        """
        self._threads.close(self.options.deadline_ns)
        if not self._is_closed:
            self._is_closed = True
            self.file.close()
        self.slab.close()

    def _span_of(self, memory: torch.Tensor) -> Span:
        span = Span.of(memory)
        self.file.require(span)
        return span

    def _submit(self, item: Item) -> Transfer:
        try:
            return self._threads.submit(item)
        except BaseException:
            item.drop()
            raise

    def _write(self, item: Item, hands: Hands, write: DeviceWrite, reserved: ExtentHeader) -> ExtentHeader:
        try:
            checksum = self._moves.write(
                hands, flat(write.memory), reserved.payload_offset, checksum=write.checksum, after=write.after
            )
            item.require_time()
        except EndUnknown:
            raise
        except BaseException:
            self.slab.abandon(reserved)
            raise
        return self.slab.begin_commit(reserved, checksum).result()

    def _read(self, hands: Hands, read: DeviceRead, stored: Stored) -> ExtentHeader:
        memory = flat(read.into)
        try:
            self._moves.read(hands, memory, stored.header.payload_offset, after=read.after)
            if self.options.check is PayloadCheck.ALWAYS:
                self._moves.verify(hands, memory, stored.header)
        except EndUnknown:
            raise
        except BaseException:
            self.slab.unpin(stored, hands.scratch)
            raise
        self.slab.unpin(stored, hands.scratch)
        return stored.header
