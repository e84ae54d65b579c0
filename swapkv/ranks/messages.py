"""What ranks say to each other: commands go out from the leader, acknowledgements come back.

A `number` names a point in the work of every rank; the leader counts them from 1. A worker that does not know a number
any more has passed it.
"""

from enum import IntEnum
from typing import TypeAlias

import attrs

from swapkv.config import Verify
from swapkv.fsm.commands import Copy
from swapkv.ids import GroupId, PhysicalPages


class Outcome(IntEnum):
    """How work ended on one rank."""

    DONE = 0
    FAILED = 1
    MISMATCH = 2
    """Its bytes were not those of the checksum."""


@attrs.frozen
class Hello:
    """A worker's first message: who it is and what it has. `fields`: its layout, field by field, as text."""

    rank: int
    size: int
    pages: tuple[int, ...]
    host_bytes: int
    fields: dict[str, str]


@attrs.frozen
class Agreed:
    """The leader's answer: what every rank uses."""

    pages: tuple[int, ...]
    host_bytes: int
    verify: Verify


@attrs.frozen
class Refused:
    """The leader's other answer: the ranks do not fit together. Its last message."""

    reason: str


@attrs.frozen
class Alive:
    """Nothing to say, but not dead."""


@attrs.frozen
class OpenStream:
    """A compute stream; `stream` counts from 0."""

    stream: int
    name: str


@attrs.frozen(eq=False)
class SubmitCopy:
    """A copy command for one rank, its checksums that rank's own, its fences said by the numbers `after`."""

    number: int
    copy: Copy
    after: tuple[int, ...]


@attrs.frozen(eq=False)
class Clone:
    """Copy device pages on a compute stream, as `ClonePages`."""

    number: int
    stream: int
    group: GroupId
    source: PhysicalPages
    target: PhysicalPages
    after: tuple[int, ...]


@attrs.frozen
class Wait:
    """Later work of `stream` starts after `number`; if that has failed already, `failure` says why ("": it has not)."""

    stream: int
    number: int
    failure: str


@attrs.frozen
class Record:
    """`number` is reached when all work given to `stream` so far is over."""

    stream: int
    number: int


@attrs.frozen
class UseUpGates:
    """A wait of `stream` that failed with no work behind it fails no later work: let it fail a copy of nothing."""

    stream: int


@attrs.frozen
class OpenPromise:
    """`number` is reached when the leader says so."""

    number: int


@attrs.frozen
class SetPromise:
    """The leader says so; with a `failure`, the promise fails."""

    number: int
    failure: str


@attrs.frozen
class Run:
    """Run the worker's part of a forward on `stream`. `gates`: promises; 0: kept already, -1: failed already."""

    number: int
    stream: int
    payload: bytes
    gates: tuple[int, ...]


@attrs.frozen
class Close:
    """End all work within the time, say `Bye`. The leader's last message."""

    timeout_ms: int


@attrs.frozen
class Ack:
    """`number` has been reached on the rank that says so. `checksums`: of a D2H copy, the rank's own."""

    number: int
    outcome: Outcome
    checksums: tuple[int, ...]
    reason: str


@attrs.frozen
class Bye:
    """All work has ended but that of the streams `stuck`. A worker's last message."""

    stuck: tuple[str, ...]


@attrs.frozen
class Failed:
    """The worker cannot go on. Its last message."""

    reason: str


Message: TypeAlias = (
    Hello
    | Agreed
    | Refused
    | Alive
    | OpenStream
    | SubmitCopy
    | Clone
    | Wait
    | Record
    | UseUpGates
    | OpenPromise
    | SetPromise
    | Run
    | Close
    | Ack
    | Bye
    | Failed
)

LAST = (Refused, Close, Bye, Failed)
"""After one of these its sender says no more."""
