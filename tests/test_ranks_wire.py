"""The wire format of ranks: what is encoded comes back, and nothing else gets through."""

import struct
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapkv import Verify
from swapkv.errors import MalformedMessage, ProtocolError
from swapkv.fsm.commands import ClonePages, Copy, CopyItem
from swapkv.ids import ChunkId, Fence, GroupId, HostOffset, Lane, LayerId, OpId, SeqId
from swapkv.ranks import messages
from swapkv.ranks.leader import RankDevice, RankStream, RankTransfers
from swapkv.ranks.link import RankPromise
from swapkv.ranks.messages import Message, Outcome
from swapkv.ranks.wire import FRAME_BYTES_MAX, MAGIC, VERSION, decode, encode
from swapkv.streams.base import ComputeStream, Device, Promise
from swapkv.transfers import Transfers

INT = st.integers(0, (1 << 63) - 1)
SMALL = st.integers(0, 1 << 20)
SUM = st.integers(0, (1 << 32) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def many(of: Any, most: int = 6) -> Any:
    return st.lists(of, max_size=most).map(tuple)


PAGES = st.lists(INT, max_size=8).map(lambda pages: np.array(pages, dtype=np.int64))

ITEM = st.builds(
    CopyItem,
    chunk=INT.map(ChunkId),
    pages=PAGES,
    first=SMALL,
    host=INT.map(HostOffset),
    guard_first=SMALL,
    guard_pages=SMALL,
    checksums=many(SUM),
    sealed=SMALL,
)


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    lane = draw(st.sampled_from([Lane.OUT, Lane.IN]))
    return Copy(
        op=OpId(draw(INT)),
        lane=lane,
        fence=Fence(lane, draw(st.integers(1, 1 << 40))),
        sequence=SeqId(draw(TEXT)),
        group=GroupId(draw(SMALL)),
        layers=tuple(LayerId(layer) for layer in draw(many(SMALL))),
        items=draw(many(ITEM, 3)),
        after=(),
        num_bytes=draw(INT),
    )


MESSAGE = st.one_of(
    st.builds(messages.Hello, INT, INT, many(INT), INT, st.dictionaries(TEXT, TEXT, max_size=4)),
    st.builds(messages.Agreed, many(INT), INT, st.sampled_from(Verify)),
    st.builds(messages.Refused, TEXT),
    st.builds(messages.Alive),
    st.builds(messages.OpenStream, INT, TEXT),
    st.builds(messages.SubmitCopy, INT, copies(), many(INT)),
    st.builds(messages.Clone, INT, INT, SMALL.map(GroupId), PAGES, PAGES, many(INT)),
    st.builds(messages.Wait, INT, INT, TEXT),
    st.builds(messages.Record, INT, INT),
    st.builds(messages.UseUpGates, INT),
    st.builds(messages.OpenPromise, INT),
    st.builds(messages.SetPromise, INT, TEXT),
    st.builds(messages.Run, INT, INT, st.binary(max_size=30), many(st.integers(-1, 1 << 40))),
    st.builds(messages.Close, INT),
    st.builds(messages.Ack, INT, st.sampled_from(Outcome), many(SUM), TEXT),
    st.builds(messages.Bye, many(TEXT)),
    st.builds(messages.Failed, TEXT),
)


def plain(thing: Any) -> Any:
    """A message as lists and numbers, which compare by value."""
    if isinstance(thing, np.ndarray):
        return thing.tolist()
    if attrs.has(type(thing)):
        return type(thing).__name__, [plain(getattr(thing, field.name)) for field in attrs.fields(type(thing))]
    if isinstance(thing, tuple | list):
        return [plain(part) for part in thing]
    return thing


def test_every_message_has_a_strategy_here() -> None:
    strategies = {s.wrapped_strategy.target for s in MESSAGE.original_strategies}  # type: ignore[attr-defined]
    assert strategies == set(Message.__args__)  # type: ignore[attr-defined]


def test_wire_carries_every_field_of_a_copy() -> None:
    """A field that is added to a command has to be added to the wire, or said here not to concern workers."""
    items = {field.name for field in attrs.fields(CopyItem)}
    assert items == {"chunk", "pages", "first", "host", "guard_first", "guard_pages", "checksums", "sealed"}
    copy = {field.name for field in attrs.fields(Copy)} - {"after"}  # which goes as numbers
    assert copy == {"op", "lane", "fence", "sequence", "group", "layers", "items", "num_bytes"}
    clone = {field.name for field in attrs.fields(ClonePages)} - {"after", "step", "fence"}
    assert clone == {"group", "source", "target"}


def test_workers_are_told_of_whatever_moves_bytes() -> None:
    """A method that is added to `Transfers` has to be mirrored, or said here to be of one rank."""
    public = {name for name in vars(Transfers) if not name.startswith("_")}
    assert public - {"rows", "host_pages"} == {name for name in vars(RankTransfers) if not name.startswith("_")}
    for mirrored, protocol in ((RankStream, ComputeStream), (RankDevice, Device), (RankPromise, Promise)):
        wanted = {name for base in protocol.__mro__ for name in vars(base) if not name.startswith("_")}
        assert wanted - {"name"} <= set(vars(mirrored))


@given(st.lists(MESSAGE, min_size=1, max_size=3))
def test_frame_of_messages_decoded_is_the_same(told: list[Message]) -> None:
    assert plain(decode(b"".join(map(encode, told)))) == plain(told)


@given(st.binary(max_size=200))
def test_garbage_decoded_raises_malformed(garbage: bytes) -> None:
    if garbage:
        with pytest.raises(MalformedMessage):
            decode(garbage)


@given(MESSAGE, st.data())
def test_damaged_message_decoded_raises_malformed_or_is_a_message(message: Message, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(bytes(damaged))
    except MalformedMessage:
        return
    assert all(isinstance(one, Message.__args__) for one in decoded)  # type: ignore[attr-defined]


@given(MESSAGE, st.data())
def test_message_of_damaged_body_decoded_raises_malformed_or_is_a_message(
    message: Message, data: st.DataObject
) -> None:
    """The header stays whole, so that the damage reaches the fields: counts, lengths, numbers out of range."""
    whole = encode(message)
    body = bytearray(whole[12:])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(body) - 8)))
        body[at : at + 8] = struct.pack(
            "<q", data.draw(st.sampled_from([-1, 0, 1, 7, 1 << 31, (1 << 63) - 1, -(1 << 63)]))
        )
    frame = whole[:8] + struct.pack("<I", len(body)) + bytes(body)
    try:
        decoded = decode(frame)
    except MalformedMessage:
        return
    assert len(decoded) == 1


@given(MESSAGE, st.data())
def test_truncated_message_decoded_raises_malformed(message: Message, data: st.DataObject) -> None:
    whole = encode(message)
    with pytest.raises(MalformedMessage):
        decode(whole[: data.draw(st.integers(1, len(whole) - 1))])


def test_message_of_another_version_decoded_names_both_versions() -> None:
    frame = struct.pack("<4sHHI", MAGIC, VERSION + 1, 4, 0)
    with pytest.raises(MalformedMessage, match=f"version {VERSION + 1}, this is {VERSION}"):
        decode(frame)


def test_huge_count_decoded_raises_malformed_before_memory_is_taken() -> None:
    body = struct.pack("<qq", 1, (1 << 63) - 1)
    frame = struct.pack("<4sHHI", MAGIC, VERSION, 12, len(body)) + body
    with pytest.raises(MalformedMessage):
        decode(frame)


def test_message_larger_than_a_frame_encoded_is_refused() -> None:
    with pytest.raises(ProtocolError, match="say less"):
        encode(messages.Run(1, 0, bytes(FRAME_BYTES_MAX), ()))
