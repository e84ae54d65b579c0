"""Messages as bytes: a fixed header, then integers and arrays in little-endian order, every length checked before use.

A message is `magic "SKVR", version u16, kind u16, body length u32` and a body of its fields in the order of their
declaration: integers as i64, arrays as a count and their elements, text as UTF-8. A frame is one or more messages.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from swapkv.config import Verify
from swapkv.errors import MalformedMessage, ProtocolError
from swapkv.fsm.commands import Copy, CopyItem
from swapkv.ids import ChunkId, Fence, GroupId, HostOffset, Lane, LayerId, OpId, SeqId
from swapkv.ranks import messages
from swapkv.ranks.messages import Message, Outcome

VERSION = 1
MAGIC = b"SKVR"
FRAME_BYTES_MAX = 64 << 20

_HEADER = struct.Struct("<4sHHI")
_INT = struct.Struct("<q")
_INT_MAX = (1 << 63) - 1
_VERIFY = tuple(Verify)


def encode(message: Message) -> bytes:
    """One message as bytes. Raises `ProtocolError` for one of more than `FRAME_BYTES_MAX` bytes."""
    kind, codecs = _SPECS[type(message)]
    writer = _Writer()
    for codec, field in zip(codecs, attrs.fields(type(message)), strict=True):
        codec[0](writer, getattr(message, field.name))
    body = b"".join(writer.parts)
    if len(body) + _HEADER.size > FRAME_BYTES_MAX:
        raise ProtocolError(f"{type(message).__name__} of {len(body)} bytes, a frame has {FRAME_BYTES_MAX}: say less")
    return _HEADER.pack(MAGIC, VERSION, kind, len(body)) + body


def decode(frame: bytes) -> list[Message]:
    """The messages of a frame. Raises `MalformedMessage` for anything that `encode` has not made."""
    view, decoded = memoryview(frame), []
    while view:
        if len(view) < _HEADER.size:
            raise MalformedMessage(f"{len(view)} bytes are left of a frame, a header has {_HEADER.size}")
        magic, version, kind, length = _HEADER.unpack_from(view)
        if magic != MAGIC:
            raise MalformedMessage(f"a message begins with {magic!r}, not with {MAGIC!r}: is the peer a swapkv rank?")
        if version != VERSION:
            raise MalformedMessage(
                f"a message of wire version {version}, this is {VERSION}: run one swapkv on all ranks"
            )
        if kind not in _KINDS or length > len(view) - _HEADER.size:
            raise MalformedMessage(f"kind {kind} of {length} bytes, {len(view) - _HEADER.size} are left of the frame")
        decoded.append(_decode_body(_KINDS[kind], view[_HEADER.size : _HEADER.size + length]))
        view = view[_HEADER.size + length :]
    return decoded


def _decode_body(kind: type, body: memoryview) -> Message:
    reader = _Reader(body)
    message: Message = kind(*[get(reader) for _, get in _SPECS[kind][1]])
    if reader.left:
        raise MalformedMessage(f"{kind.__name__} is followed by {reader.left} bytes that belong to nothing")
    return message


class _Writer:
    """Collects the parts of a body."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def integer(self, value: int) -> None:
        self.parts.append(_INT.pack(value))

    def raw(self, value: bytes) -> None:
        self.integer(len(value))
        self.parts.append(value)

    def text(self, value: str) -> None:
        self.raw(value.encode(errors="backslashreplace"))

    def array(self, values: Sequence[int] | NDArray[np.int64], dtype: str = "<i8") -> None:
        elements = np.asarray(values, dtype=dtype)
        self.integer(len(elements))
        self.parts.append(elements.tobytes())


class _Reader:
    """Takes a body apart; whatever does not fit raises `MalformedMessage`."""

    def __init__(self, body: memoryview) -> None:
        self._body = body

    @property
    def left(self) -> int:
        return len(self._body)

    def take(self, num_bytes: int) -> memoryview:
        if not 0 <= num_bytes <= len(self._body):
            raise MalformedMessage(f"{num_bytes} bytes are announced, {len(self._body)} are left of the message")
        taken, self._body = self._body[:num_bytes], self._body[num_bytes:]
        return taken

    def integer(self, low: int = 0, high: int = _INT_MAX) -> int:
        value: int = _INT.unpack(self.take(_INT.size))[0]
        if not low <= value <= high:
            raise MalformedMessage(f"{value} is not within {low} to {high}")
        return value

    def raw(self) -> bytes:
        return bytes(self.take(self.integer()))

    def text(self) -> str:
        try:
            return self.raw().decode()
        except UnicodeDecodeError as error:
            raise MalformedMessage(f"text that is not UTF-8: {error}") from error

    def array(self, low: int = 0, dtype: str = "<i8") -> NDArray[np.int64]:
        count = self.integer()
        elements = np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype).astype(np.int64)
        if count and int(elements.min()) < low:
            raise MalformedMessage(f"{int(elements.min())} is below {low} in an array")
        return elements

    def numbers(self, low: int = 0, dtype: str = "<i8") -> tuple[int, ...]:
        return tuple(self.array(low, dtype).tolist())


def _put_texts(writer: _Writer, texts: Sequence[str]) -> None:
    writer.integer(len(texts))
    for text in texts:
        writer.text(text)


def _get_texts(reader: _Reader) -> tuple[str, ...]:
    return tuple([reader.text() for _ in range(reader.integer(high=reader.left // _INT.size))])


def _put_fields(writer: _Writer, fields: dict[str, str]) -> None:
    _put_texts(writer, [part for pair in fields.items() for part in pair])


def _get_fields(reader: _Reader) -> dict[str, str]:
    parts = _get_texts(reader)
    if len(parts) % 2:
        raise MalformedMessage("a layout field without a value")
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _put_copy(writer: _Writer, copy: Copy) -> None:
    """The items as arrays: one element an item, then the pages and checksums of all of them on end."""
    for value in (copy.op, copy.lane, copy.fence.value, copy.group, copy.num_bytes):
        writer.integer(value)
    writer.text(copy.sequence)
    writer.array(copy.layers)
    items = copy.items
    for name in ("chunk", "first", "host", "guard_first", "guard_pages", "sealed"):
        writer.array([getattr(item, name) for item in items])
    writer.array([len(item.pages) for item in items])
    writer.array(np.concatenate([item.pages for item in items]) if items else ())
    writer.array([len(item.checksums) for item in items])
    writer.array([checksum for item in items for checksum in item.checksums], "<u4")


def _get_copy(reader: _Reader) -> Copy:
    op, lane = OpId(reader.integer()), Lane(reader.integer(Lane.OUT, Lane.IN))
    fence, group, num_bytes = Fence(lane, reader.integer(1)), GroupId(reader.integer()), reader.integer()
    sequence, layers = SeqId(reader.text()), reader.numbers()
    columns = [reader.numbers() for _ in range(6)]
    pages = _split(reader.numbers(), reader.array())
    checksums = _split(reader.numbers(), reader.array(dtype="<u4"))
    if any(len(column) != len(pages) for column in (*columns, checksums)):
        raise MalformedMessage(f"the arrays of a copy are of unequal length: {[len(c) for c in columns]}, {len(pages)}")
    items = tuple(
        CopyItem(ChunkId(chunk), page, first, HostOffset(host), guard, guard_pages, tuple(checksum.tolist()), sealed)
        for chunk, first, host, guard, guard_pages, sealed, page, checksum in zip(
            *columns, pages, checksums, strict=True
        )
    )
    return Copy(op, lane, fence, sequence, group, tuple(map(LayerId, layers)), items, (), num_bytes)


def _split(sizes: tuple[int, ...], elements: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """`elements` cut into consecutive parts of these sizes, which must add up."""
    if sum(sizes) != len(elements):
        raise MalformedMessage(f"parts of {sum(sizes)} elements in an array of {len(elements)}")
    return np.split(elements, np.cumsum(sizes)[:-1]) if sizes else []


_Codec: TypeAlias = tuple[Callable[[_Writer, Any], None], Callable[[_Reader], Any]]

_NUMBER: _Codec = (_Writer.integer, _Reader.integer)
_TEXT: _Codec = (_Writer.text, _Reader.text)
_NUMBERS: _Codec = (_Writer.array, _Reader.numbers)
_GATES: _Codec = (_Writer.array, lambda reader: reader.numbers(low=-1))
_PAGES: _Codec = (_Writer.array, _Reader.array)
_CHECKSUMS: _Codec = (lambda writer, sums: writer.array(sums, "<u4"), lambda reader: reader.numbers(dtype="<u4"))
_OUTCOME: _Codec = (_Writer.integer, lambda reader: Outcome(reader.integer(high=max(Outcome))))
_VERIFIED: _Codec = (
    lambda writer, verify: writer.integer(_VERIFY.index(verify)),
    lambda reader: _VERIFY[reader.integer(high=len(_VERIFY) - 1)],
)

_SPECS: dict[type, tuple[int, tuple[_Codec, ...]]] = {
    messages.Hello: (1, (_NUMBER, _NUMBER, _NUMBERS, _NUMBER, (_put_fields, _get_fields))),
    messages.Agreed: (2, (_NUMBERS, _NUMBER, _VERIFIED)),
    messages.Refused: (3, (_TEXT,)),
    messages.Alive: (4, ()),
    messages.OpenStream: (5, (_NUMBER, _TEXT)),
    messages.SubmitCopy: (6, (_NUMBER, (_put_copy, _get_copy), _NUMBERS)),
    messages.Clone: (7, (_NUMBER, _NUMBER, _NUMBER, _PAGES, _PAGES, _NUMBERS)),
    messages.Wait: (8, (_NUMBER, _NUMBER, _TEXT)),
    messages.Record: (9, (_NUMBER, _NUMBER)),
    messages.OpenPromise: (10, (_NUMBER,)),
    messages.SetPromise: (11, (_NUMBER, _TEXT)),
    messages.Run: (12, (_NUMBER, _NUMBER, (_Writer.raw, _Reader.raw), _GATES)),
    messages.Close: (13, (_NUMBER,)),
    messages.Ack: (14, (_NUMBER, _OUTCOME, _CHECKSUMS, _TEXT)),
    messages.Bye: (15, ((_put_texts, _get_texts),)),
    messages.Failed: (16, (_TEXT,)),
    messages.UseUpGates: (17, (_NUMBER,)),
}
"""The kind of each message, and how each of its fields is put and got."""

_KINDS = {kind: message for message, (kind, _) in _SPECS.items()}
