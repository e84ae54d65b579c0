"""What scenario tests of the core ask a stage again and again."""

from typing import TypeVar

from swapkv.fsm import commands
from swapkv.fsm.transitions import ChunkState
from swapkv.ids import Lane, SeqId
from tests.kit.stage import GROUP, PLAIN, Stage

T = TypeVar("T")

PAGE_BYTES = PLAIN.page_bytes(GROUP)


def with_tokens(tokens: int, stage: Stage | None = None, name: str = "a", priority: int = 0) -> Stage:
    """A new sequence on the device with some tokens, all computed."""
    stage = stage or Stage()
    stage.register(name, priority=priority)
    stage.append(name, tokens)
    stage.come_to_rest()
    return stage


def trip(stage: Stage, name: str = "a") -> None:
    """Off the device and back."""
    assert stage.preempt(name)
    stage.come_to_rest()
    assert stage.restore(name)
    stage.come_to_rest()


def news(stage: Stage, kind: type[T], name: str | None = None) -> list[T]:
    """What the core has told of one kind (about one sequence), the oldest first."""
    found = [told for told in stage.news if isinstance(told, kind)]
    return [told for told in found if name is None or getattr(told, "sequence", None) == name]


def copies(stage: Stage, lane: Lane = Lane.OUT, name: str | None = None) -> list[commands.Copy]:
    """The copies that were submitted to one lane (for one sequence), the oldest first."""
    return [copy for copy in news(stage, commands.Copy, name) if copy.lane is lane]


def table(stage: Stage, name: str = "a", group: int = 0) -> list[int]:
    return stage.core.sequences[SeqId(name)].tables[group].pages.tolist()


def states(stage: Stage, name: str = "a") -> set[ChunkState]:
    return {chunk.state for chunk in stage.core.sequences[SeqId(name)].live_chunks()}
