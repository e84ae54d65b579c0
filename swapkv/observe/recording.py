"""An observer that writes records."""

from collections.abc import Sequence

from swapkv.fsm.queries import SequenceState
from swapkv.fsm.transitions import ChunkState
from swapkv.ids import ChunkId, Lane, OpId, SeqId
from swapkv.observe.records import CopyRecord, Recorder, StateRecord, StepRecord, TransitionRecord
from swapkv.observer import Observer


class RecordingObserver(Observer):
    """Keeps what a pool does in `recorder`, for the trace and the timeline."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder if recorder is not None else Recorder()

    def on_transition(
        self, chunk: ChunkId, sequences: Sequence[SeqId], before: ChunkState, after: ChunkState, now_ns: int
    ) -> None:
        """See `Observer`."""
        self.recorder.add(
            TransitionRecord(
                at_ns=now_ns, chunk=chunk, sequences=tuple(sequences), before=before.value, after=after.value
            )
        )

    def on_state(self, sequence: SeqId, state: SequenceState | None, now_ns: int) -> None:
        """See `Observer`."""
        name = "FINISHED" if state is None else state.value
        self.recorder.add(StateRecord(at_ns=now_ns, sequence=sequence, state=name))

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
        """See `Observer`."""
        self.recorder.add(
            CopyRecord(
                begin_ns=begin_ns,
                end_ns=end_ns,
                lane=lane.name,
                op=op,
                num_bytes=num_bytes,
                chunks=num_chunks,
                sequences=(sequence,),
                error=None if error is None else str(error),
            )
        )

    def on_forward(self, sequences: Sequence[SeqId], begin_ns: int, end_ns: int) -> None:
        """See `Observer`."""
        self.recorder.add(StepRecord(begin_ns=begin_ns, end_ns=end_ns, sequences=tuple(sequences)))
