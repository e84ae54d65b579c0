"""Work of a stream that is given and submitted, and does not begin."""

import threading

from swapkv.config import Verify
from swapkv.streams.base import Block, Event, Stream
from tests.cudahost.kernels import LONG_S, KernelDevice
from tests.cudahost.pages import one_page


class HeldStream:
    """Work of a stream that does not begin before `go`."""

    def __init__(self, device: KernelDevice) -> None:
        self.go = threading.Event()
        self.stream = device.create_stream("held")
        self.stream.wait(device.create_stream("before").launch(lambda: self.go.wait(LONG_S)))

    def gather(self, device: KernelDevice, count: int) -> tuple[list[Block], list[Event]]:
        """`count` copies of pages of their own, each a launch."""
        blocks = [one_page(device, value=at + 1) for at in range(count)]
        return blocks, [self.stream.gather([block], Verify.NONE) for block in blocks]


def submitted(stream: Stream) -> int:
    return int(stream._timeline.submitted)  # type: ignore[attr-defined]
