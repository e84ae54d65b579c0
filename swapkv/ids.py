"""The identifiers of swapkv, each a type of its own so that two kinds cannot be mixed."""

from enum import IntEnum
from typing import NamedTuple, NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

SeqId = NewType("SeqId", str)
"""A sequence: the name that the caller gave to one request's KV."""

GroupId = NewType("GroupId", int)
"""A layer group: index into `KVLayout.groups`."""

LayerId = NewType("LayerId", int)
"""A layer of the model, counted from 0."""

PhysicalPage = NewType("PhysicalPage", int)
"""A slot on the device. Numbers run through all groups, so one number names one place."""

LogicalPage = NewType("LogicalPage", int)
"""A position in a sequence: tokens `[n * page_size, (n + 1) * page_size)`."""

ChunkId = NewType("ChunkId", int)
"""A run of consecutive logical pages; never used twice."""

OpId = NewType("OpId", int)
"""One copy command; never used twice."""

StepId = NewType("StepId", int)
"""One forward pass, from its pins to its fence."""

HostOffset = NewType("HostOffset", int)
"""Where a chunk's copy begins in the host arena, in bytes."""

PhysicalPages: TypeAlias = NDArray[np.int64]
"""Physical pages in logical order, shape `[n]`; -1 stands for a page that is not on the device."""


class Lane(IntEnum):
    """An ordered queue of device work: what it was given first, it finishes first."""

    COMPUTE = 0
    OUT = 1
    IN = 2


class Fence(NamedTuple):
    """The point that `lane` reaches when its work number `value` is over. Values count from 1."""

    lane: Lane
    value: int
