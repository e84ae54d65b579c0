"""A ring of staging buffers through which host pages come to the device, in the order of a plan."""

import time
from collections import deque
from collections.abc import Hashable, Sequence

import attrs
import torch

from swapkv.attention.pieces import Rules
from swapkv.config import Verify
from swapkv.errors import ProtocolError, SwapError
from swapkv.ids import LayerId
from swapkv.streams.base import Block, CopyEvent, Device, Region, Stream


@attrs.frozen(kw_only=True, eq=False)
class Fetch:
    """One unit of one layer of one sequence that has to come from the host. `key` tells whether two are the same."""

    key: tuple[Hashable, ...]
    pieces: tuple[tuple[int, tuple[torch.Tensor, ...]], ...]
    """Where in the buffer a piece begins (in pages), and its host bytes by plane."""

    @property
    def pages(self) -> list[range]:
        """Which pages of the unit come, counted from its first."""
        return [range(at, at + planes[0].shape[0]) for at, planes in self.pieces]

    @property
    def num_bytes(self) -> int:
        return sum(plane.numel() for _, planes in self.pieces for plane in planes)


@attrs.define
class StreamCounts:
    """`bytes_streamed`: what crossed the link. `stalled_ns`: how long attention waited for it. `wasted_fetches`: units
    that were fetched and not asked for."""

    bytes_streamed: int = 0
    stalled_ns: int = 0
    wasted_fetches: int = 0


class Streamer:
    """A ring of staging buffers on one device, filled in the order of a plan, emptied in the same order.

    `planes`: one layer's planes on the device (all layers must be alike). `depth`: buffers, at least 2: one is
    attended to while the others fill. `host`: a stream whose callables attend on the host (`Strategy.HYBRID`).
    All calls belong on one thread at a time; `take` may run in a callable of the compute stream.
    Raises `ProtocolError` for numbers that do not fit.
    """

    def __init__(self, device: Device, planes: Sequence[torch.Tensor], rules: Rules, *, depth: int = 4) -> None:
        if depth < 2:
            raise ProtocolError(f"depth={depth} must be at least 2 buffers: one is read while another fills")
        self.rules = rules
        self.depth = depth
        self.counts = StreamCounts()
        self.host = device.create_stream("attend-host")
        self._unit_pages = rules.unit_tokens // rules.page_size
        self._link = device.create_stream("stream-in")
        rows = depth * self._unit_pages
        self.buffers = tuple(_staging(device, plane, rows) for plane in planes)
        self._regions = tuple(
            Region(layer=LayerId(0), name=f"staging {n}", pages=buffer.view(torch.uint8).view(rows, -1))
            for n, buffer in enumerate(self.buffers)
        )
        self._rows = torch.arange(rows).view(depth, -1)
        self._free = deque(range(depth))
        self._planned: deque[Fetch] = deque()
        self._coming: deque[tuple[Fetch, int, CopyEvent]] = deque()
        self._taken: int | None = None

    @property
    def staging_bytes(self) -> int:
        """Device memory of the ring."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def plan(self, fetches: Sequence[Fetch]) -> None:
        """What will be asked for next, after what is planned already. Fills the ring as far as it goes."""
        self._planned.extend(fetches)
        self._fill()

    def pending_keys(self) -> list[tuple[Hashable, ...]]:
        """What the ring will give, in order."""
        return [fetch.key for fetch, _, _ in self._coming] + [fetch.key for fetch in self._planned]

    def is_there(self) -> bool:
        """Whether what the ring gives next has come, so that `take` does not wait."""
        return bool(self._coming) and self._coming[0][2].query()

    def take(self, fetch: Fetch, stream: Stream) -> tuple[torch.Tensor, ...]:
        """The staged pages of the next fetch of the plan, a tensor a plane `[unit_pages, …]`, once `stream` may read them.

        They stay until `give_back`. Raises `ProtocolError` if it is not the next one, or the last one was not given
        back, and `TransferError` if its copy failed: nothing has changed, a new `Step` may try again.
        """
        if self._taken is not None or not self._coming or self._coming[0][0].key != fetch.key:
            raise ProtocolError(
                f"fetch {fetch.key} is not what the ring gives next, {self.pending_keys()[:1]}: ask in the order of the plan"
            )
        _, buffer, event = self._coming.popleft()
        begin_ns = time.perf_counter_ns()
        try:
            stream.wait(event)
        except SwapError:
            self._free.append(buffer)
            raise
        self._taken = buffer
        self.counts.stalled_ns += time.perf_counter_ns() - begin_ns
        self.counts.bytes_streamed += fetch.num_bytes
        low = buffer * self._unit_pages
        return tuple(staged[low : low + self._unit_pages] for staged in self.buffers)

    def give_back(self, stream: Stream) -> None:
        """`stream` has been given all that reads the buffer that was taken: it may be filled again after that."""
        assert self._taken is not None
        read = stream.record()
        if not read.query():
            self._link.wait(read)
        self._free.append(self._taken)
        self._taken = None
        self._fill()

    def reset(self) -> None:
        """Forget the plan, and wait until what is under way has ended, well or badly."""
        self._planned.clear()
        self.counts.wasted_fetches += len(self._coming)
        self._coming.clear()
        self._link.record().wait()
        self._free = deque(range(self.depth))
        self._taken = None

    def _fill(self) -> None:
        while self._free and self._planned:
            fetch, buffer = self._planned.popleft(), self._free.popleft()
            self._coming.append((fetch, buffer, self._link.scatter(self._blocks(fetch, buffer), Verify.NONE)))

    def _blocks(self, fetch: Fetch, buffer: int) -> list[Block]:
        rows = self._rows[buffer]
        return [
            Block(regions=self._regions, pages=rows[at : at + planes[0].shape[0]], host=planes)
            for at, planes in fetch.pieces
        ]


def _staging(device: Device, plane: torch.Tensor, rows: int) -> torch.Tensor:
    page_numbers = plane[0].numel()
    memory = device.allocate(rows * page_numbers * plane.element_size())
    return memory.view(plane.dtype).view(rows, *plane.shape[1:])
