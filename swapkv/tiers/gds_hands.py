"""What a thread of the GDS tier works with: streams, a piece of pinned memory, and copies of bytes through it."""

import threading

import torch
import xxhash

from swapkv.config import Verify
from swapkv.errors import DrainTimeout, SwapError
from swapkv.ids import LayerId
from swapkv.streams.base import Block, CopyEvent, Device, Region
from swapkv.tiers.direct_io import Scratch
from swapkv.tiers.gds_types import EndUnknown, GdsFile

_ROW = torch.zeros(1, dtype=torch.int64)


class Hands:
    """One thread's own. `io`: a stream for requests to the disk, and nothing else. Memory is uint8 `[num_bytes]`.

    Copies block until they are over. Raise `TransferError` if the device failed them, `CudaLost`, and `EndUnknown`.
    """

    def __init__(self, device: Device, number: int, stage_bytes: int) -> None:
        self.io = device.create_stream(f"gds-io-{number}")
        self.scratch = Scratch()
        self._copies = device.create_stream(f"gds-copies-{number}")
        self._halves = device.allocate_pinned(stage_bytes).view(2, stage_bytes // 2)
        self._bound: tuple[GdsFile, threading.Thread] | None = None

    @property
    def stage(self) -> torch.Tensor:
        """The pinned memory that `fetch` and `put` go through: uint8 `[num_bytes]`."""
        return self._halves[0]

    def bind(self, file: GdsFile) -> None:
        """Make the calling thread one that may use `file`."""
        bound = (file, threading.current_thread())
        if self._bound != bound:
            file.bind()
            self._bound = bound

    def digest(self, memory: torch.Tensor) -> bytes:
        """XXH3-128 of device memory, 16 bytes, as `payload_checksum`: half of the stage is hashed while half is copied."""
        digest, half_bytes = xxhash.xxh3_128(), self._halves.shape[1]
        pieces = [memory[begin : begin + half_bytes] for begin in range(0, len(memory), half_bytes)]
        coming = self._gather(pieces[0], 0)
        try:
            for at, piece in enumerate(pieces):
                come, turn = coming, at % 2
                if at + 1 < len(pieces):
                    coming = self._gather(pieces[at + 1], 1 - turn)
                come.wait()
                digest.update(self._halves[turn, : len(piece)].numpy().data)
        except BaseException:
            self._settle()
            raise
        return digest.digest()

    def fetch(self, memory: torch.Tensor) -> memoryview:
        """Bytes of device memory, at most half a stage, in host memory that the next copy uses again."""
        self._over(self._gather(memory, 0))
        return self._halves[0, : len(memory)].numpy().data

    def put(self, memory: torch.Tensor, payload: memoryview) -> None:
        """Write bytes, at most half a stage, to device memory."""
        if len(memory):
            self._halves[0, : len(memory)] = torch.frombuffer(payload, dtype=torch.uint8)
            self._over(self._copies.scatter([self._block(memory, 0)], Verify.NONE))

    def _gather(self, memory: torch.Tensor, half: int) -> CopyEvent:
        return self._copies.gather([self._block(memory, half)], Verify.NONE)

    def _block(self, memory: torch.Tensor, half: int) -> Block:
        region = Region(layer=LayerId(0), name="gds", pages=memory.view(1, -1))
        return Block(regions=[region], pages=_ROW, host=[self._halves[half, : len(memory)].view(1, -1)])

    def _over(self, copy: CopyEvent) -> None:
        try:
            copy.wait()
        except BaseException:
            self._settle()
            raise

    def _settle(self) -> None:
        """After a failure: wait until no copy is under way."""
        try:
            self._copies.record().wait()
        except DrainTimeout as error:
            raise EndUnknown("the device was closed with copies of the GDS tier under way") from error
        except SwapError:
            return


def flat(memory: torch.Tensor) -> torch.Tensor:
    """Contiguous memory as uint8 `[num_bytes]`, no copy."""
    return memory.reshape(-1).view(torch.uint8)
