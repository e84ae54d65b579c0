"""The real core on a stamped device, moved by hand: which lane works, and which end is told, is the test's choice."""

from collections.abc import Callable
from itertools import count
from typing import Any

from swapkv.config import SwapConfig
from swapkv.fsm import commands, events
from swapkv.fsm.core import SwapCore
from swapkv.fsm.queries import SequenceState, state_of
from swapkv.ids import GroupId, Lane, SeqId, StepId
from swapkv.layout import KVLayout
from tests.kit.harness import Harness

PLAIN = KVLayout.dense(num_layers=2, num_kv_heads=1, head_dim=4, page_size=2, chunk_tokens=4)
WINDOWED = KVLayout.dense(num_layers=2, num_kv_heads=1, head_dim=4, page_size=2, chunk_tokens=4, windows=[3, None])
GROUP = GroupId(0)
SMALL_COPIES = SwapConfig(segment_bytes=1)


class Stage(Harness):
    """`pages` of two tokens, two pages a chunk, one layer of one chunk a copy. Names are sequences' ids."""

    def __init__(
        self, pages: int = 8, host_chunks: int = 16, config: SwapConfig = SMALL_COPIES, layout: KVLayout = PLAIN
    ) -> None:
        host_bytes = host_chunks * layout.chunk_bytes(GROUP)
        super().__init__(SwapCore(layout, [pages] * len(layout.groups), host_bytes, config))
        self._steps = count(1)

    def register(self, *names: str, max_tokens: int = 8, priority: int = 0) -> None:
        for name in names:
            assert self.do(events.Register(SeqId(name), max_tokens, None, priority))
            self.tokens[SeqId(name)] = []

    def append(self, name: str, more: int) -> StepId:
        """A forward that is submitted; what it computes waits in its lane."""
        step = self.begin(name, more)
        self.end_step(step)
        return step

    def begin(self, name: str, more: int) -> StepId:
        step = StepId(next(self._steps))
        assert self.begin_step(step, {SeqId(name): more}), f"no forward of {name}"
        return step

    def preempt(self, name: str) -> bool:
        return self.do(events.Preempt(SeqId(name)))

    def restore(self, name: str, priority: int | None = None) -> bool:
        return self.do(events.BeginRestore(SeqId(name), priority))

    def finish(self, name: str) -> bool:
        return self.do(events.Finish(SeqId(name)))

    def recompute(self, name: str) -> bool:
        """Run the tokens of a sequence whose KV was dropped again, as many as it had."""
        length = self.length(name)
        if not self.do(events.Reset(SeqId(name))):
            return False
        self.tokens[SeqId(name)] = []
        self.append(name, length)
        return True

    def length(self, name: str) -> int:
        """Tokens that the sequence has, or had when its KV was dropped."""
        return self.core.sequences[SeqId(name)].tokens

    def can_run(self, lane: Lane) -> bool:
        return lane in self.device.runnable()

    def run(self, lane: Lane, works: int = 1) -> None:
        """The lane does its first works; their ends are known, but not told."""
        for _ in range(works):
            assert self.can_run(lane), f"{lane.name} has nothing that could run"
            answer = self.device.run(lane)
            if answer is not None:
                self.reports.append(answer)

    def run_eagerly(self, lane: Lane) -> None:
        """The lane does all that it can."""
        while self.can_run(lane):
            self.run(lane)

    def tell(self, at: int = 0) -> None:
        """Tell the core of one end, the oldest by default."""
        report: Any = self.reports[at]
        del self.reports[at]
        assert self.do(report)

    def come_to_rest(self) -> None:
        """Let everything run and be told, in order."""
        while self.reports or self.device.runnable():
            for lane in self.device.runnable():
                self.run(lane)
            while self.reports:
                self.tell()

    def parked(self, name: str, tokens: int) -> None:
        """A new sequence with some tokens, off the device."""
        self.register(name)
        self.append(name, tokens)
        self.come_to_rest()
        assert self.preempt(name)
        self.come_to_rest()
        assert self.state(name) is SequenceState.OFFLOADED

    def reads(self, name: str) -> None:
        """A forward reads every token of the sequence, which has to be on the device, and compares."""
        self.append(name, 0)
        self.come_to_rest()

    def state(self, name: str) -> SequenceState:
        return state_of(self.core.sequences[SeqId(name)])

    def told(self, kind: type[commands.Command], name: str) -> bool:
        """Whether there was news of this kind."""
        return any(isinstance(news, kind) and getattr(news, "sequence", None) == name for news in self.news)

    @property
    def free(self) -> int:
        """Pages that a new owner could have now."""
        return self.core.ledger.available(GROUP)


def careless(settle: Callable[[SwapCore, Any], None], work: str) -> Callable[[SwapCore, Any], None]:
    """`offload.settle` or `restore.settle` without its guard: copies under way are not waited for."""

    def settle_at_once(core: SwapCore, sequence: Any) -> None:
        if getattr(sequence, work) is not None:
            getattr(sequence, work).ops.clear()
            for chunk in sequence.live_chunks():
                chunk.ops.clear()
        settle(core, sequence)

    return settle_at_once
