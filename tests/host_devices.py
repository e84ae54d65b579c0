"""What the tests of the host device share: devices that are closed for certain, and one page to copy."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swapkv.ids import LayerId
from swapkv.streams.base import Block, Region
from swapkv.streams.host import HostDevice

LONG_S = 60.0
OLD, NEW = 1, 2


@contextmanager
def opened(device: HostDevice) -> Iterator[HostDevice]:
    """Closes the device; unless the test failed, all its work must end and no thread be left."""
    before = threads_of(device)
    try:
        yield device
    except BaseException:
        device.close(0.0)
        raise
    assert device.close(LONG_S) == []
    assert threads_of(device) == before


def threads_of(device: HostDevice) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"swapkv-{device.name}-")]


def nothing() -> None:
    pass


def one_page(device: HostDevice, value: int = OLD) -> Block:
    """Page 1 of two pages of 16 bytes, all of them `value`, and a host buffer of zeros."""
    region = Region(layer=LayerId(0), name="k", pages=device.allocate(32).view(2, 16).fill_(value))
    host = [device.allocate_pinned(16).view(1, 16)]
    return Block(regions=[region], pages=torch.tensor([1]), host=host, guarded=host, checksums=[0])
