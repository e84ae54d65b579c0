"""What the parts of a run have in common: rows of the table, and streams as torch sees them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import attrs
import torch

from swapkv.streams.base import Stream
from swapkv.streams.cuda import CudaDevice

MakeDevice: TypeAlias = Callable[[], CudaDevice]


@attrs.frozen
class Row:
    """One line of the table. `ok`: None for a figure that nothing is asked of."""

    part: str
    what: str
    value: float | str
    unit: str = ""
    ok: bool | None = None


Part: TypeAlias = Callable[[MakeDevice], Iterator[Row]]


def on(stream: Stream) -> AbstractContextManager[object]:
    """torch's work goes to `stream` within; without a GPU, torch works at once."""
    handle = getattr(stream, "handle", None)
    if handle is None or not torch.cuda.is_available():
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(handle))  # type: ignore[no-untyped-call]


def wait_for_torch() -> None:
    """All that torch was given is over."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
