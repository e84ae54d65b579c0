"""Which way a slab's file is taken: the best of those that pass a real write and read."""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial

import attrs
import torch

from swapkv.errors import BudgetExhausted, ChecksumMismatch, DrainTimeout, NeverFits, ProtocolError, TransferError
from swapkv.ids import SeqId
from swapkv.streams.base import Device
from swapkv.tiers.direct_io import Scratch, aligned_buffer
from swapkv.tiers.gds_hands import Hands
from swapkv.tiers.gds_moves import Moves
from swapkv.tiers.gds_types import EndUnknown, GdsFile, GdsOptions, GdsReport
from swapkv.tiers.slab import Slab
from swapkv.tiers.slab_header import ChunkKey, ExtentHeader, payload_checksum

OpenFile = Callable[[], GdsFile]
PROBE_KEY = ChunkKey(tenant="swapkv", sequence=SeqId("gds-probe"), chunk=0)


def kvikio_files(slab: Slab, device: Device, options: GdsOptions) -> Iterable[OpenFile]:
    """How kvikio could open the slab's file. Raises `ImportError` that names the extra, `ProtocolError` for a device that
    is none of CUDA's."""
    from swapkv.streams.cuda import CudaDevice
    from swapkv.tiers.gds_kvikio import candidates

    if not isinstance(device, CudaDevice):
        raise ProtocolError(f"device {device.name!r} is none of CUDA's: use `Slab` for memory of the host")
    return candidates(slab.path, device, options.direct)


@attrs.frozen
class Opening:
    """Opens a slab's file for device memory. `hands`: what the probe works with."""

    slab: Slab
    device: Device
    hands: Hands
    options: GdsOptions

    def best_of(self, files: Iterable[OpenFile]) -> tuple[GdsFile, GdsReport]:
        """The first of `files` that opens and passes the probe. The report says why those before it do not.

        Raises `TransferError` with all reasons if none does; `DrainTimeout` for one that hangs: it may go on, so end the
        process before the slab is used again.
        """
        reasons: list[str] = []
        for open_file in files:
            try:
                return self._within_deadline(partial(self._tried, open_file, reasons))
            except (DrainTimeout, EndUnknown):
                raise
            except TransferError as error:
                if str(error) not in reasons:
                    reasons.append(str(error))
        raise TransferError(f"{self.slab.path} cannot be opened for device memory: {'; '.join(reasons)}")

    def _within_deadline(self, run: Callable[[], tuple[GdsFile, GdsReport]]) -> tuple[GdsFile, GdsReport]:
        """`run`, on a thread of its own, which is left behind if it hangs."""
        future: Future[tuple[GdsFile, GdsReport]] = Future()

        def work() -> None:
            try:
                future.set_result(run())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="swapkv-gds-open", daemon=True).start()
        wait([future], self.options.deadline_ns / 1e9)
        if not future.done():
            raise DrainTimeout(
                f"{self.slab.path} is not open and probed after {self.options.deadline_ns} ns: look at the device, end the "
                "process, and use DirectMode.NEVER"
            )
        return future.result()

    def _tried(self, open_file: OpenFile, reasons: list[str]) -> tuple[GdsFile, GdsReport]:
        file = open_file()
        try:
            return file, self._reported(file, reasons)
        except EndUnknown:
            raise
        except BaseException:
            file.close()
            raise

    def _reported(self, file: GdsFile, reasons: list[str]) -> GdsReport:
        num_bytes = self.options.probe_bytes
        try:
            reserved = self.slab.reserve(PROBE_KEY, 0, num_bytes)
        except (BudgetExhausted, NeverFits) as error:
            reasons = [*reasons, f"not probed: {error}"]
            num_bytes, write_s, read_s = 0, 1.0, 1.0
        else:
            write_s, read_s = self._probed(file, reserved)
        return GdsReport(
            path=file.path_taken,
            order=file.order,
            note="; ".join(reasons),
            versions=file.versions,
            num_bytes=num_bytes,
            write_bytes_per_s=num_bytes / write_s,
            read_bytes_per_s=num_bytes / read_s,
        )

    def _probed(self, file: GdsFile, reserved: ExtentHeader) -> tuple[float, float]:
        try:
            seconds = self._probe(file, reserved)
        except EndUnknown:
            raise
        except BaseException:
            self.slab.abandon(reserved)
            raise
        self.slab.abandon(reserved)
        return seconds

    def _probe(self, file: GdsFile, reserved: ExtentHeader) -> tuple[float, float]:
        """Seconds that a write and a read took. What is written has to be seen by the slab, too: both read it.

        Raises `ChecksumMismatch` when other bytes come back.
        """
        moves, num_bytes, at = Moves(self.slab, file), reserved.num_bytes, reserved.payload_offset
        out, back = self.device.allocate(num_bytes), self.device.allocate(num_bytes)
        stamp = _stamp(num_bytes)
        for begin in range(0, num_bytes, len(self.hands.stage)):
            part = stamp[begin : begin + len(self.hands.stage)]
            self.hands.put(out[begin : begin + len(part)], part)
        checksum = payload_checksum(stamp)
        begun = time.perf_counter()
        moves.write(self.hands, out, at, checksum=checksum, after=None)
        written = time.perf_counter()
        moves.read(self.hands, back, at, after=None)
        read = time.perf_counter()
        seen = aligned_buffer(num_bytes)
        self.slab.file.read([seen], at, Scratch())
        if not payload_checksum(seen) == self.hands.digest(back) == checksum:
            raise ChecksumMismatch(f"{self.slab.path}: the probe read other bytes than it wrote: do not use this way")
        return max(written - begun, 1e-9), max(read - written, 1e-9)


def _stamp(num_bytes: int) -> memoryview:
    words = torch.arange(num_bytes, dtype=torch.int64) * 2654435761
    return (words >> 8).to(torch.uint8).numpy().data
