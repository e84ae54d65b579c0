"""What a pool tells those who watch. A subclass overrides what it wants to see; calls come on the loop's thread."""

from collections.abc import Sequence

from swapkv.fsm.queries import SequenceState
from swapkv.fsm.transitions import ChunkState
from swapkv.ids import ChunkId, Lane, OpId, SeqId


class Observer:
    """Watches nothing. Times are `time.monotonic_ns`."""

    def on_transition(
        self, chunk: ChunkId, sequences: Sequence[SeqId], before: ChunkState, after: ChunkState, now_ns: int
    ) -> None:
        """A chunk moved along the state machine."""

    def on_state(self, sequence: SeqId, state: SequenceState | None, now_ns: int) -> None:
        """A sequence's derived state changed; None: it is finished."""

    def on_copy(
        self,
        op: OpId,
        lane: Lane,
        sequence: SeqId,
        num_chunks: int,
        num_bytes: int,
        begin_ns: int,
        end_ns: int,
        error: Exception | None,
    ) -> None:
        """A copy ended; at `begin_ns` it had been submitted and the copy before it was over."""

    def on_forward(self, sequences: Sequence[SeqId], begin_ns: int, end_ns: int) -> None:
        """A forward pass, from its grant to the end of its work on the device."""
