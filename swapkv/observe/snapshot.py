"""What the live view shows: one frozen picture of a run."""

import attrs


@attrs.frozen(kw_only=True)
class RequestRow:
    """One request. `state` is a name of `SequenceState`, `chunks` the names of its chunks' `ChunkState`s."""

    name: str
    state: str
    chunks: tuple[str, ...]
    tokens: int
    target_tokens: int
    preemptions: int
    waiting_s: float


@attrs.frozen(kw_only=True)
class RunSnapshot:
    """The whole run, called `title`. Rates in bytes/s, averaged over the last second; a limit of None means unlimited."""

    title: str
    elapsed_s: float
    rows: tuple[RequestRow, ...]
    pages_free: int
    pages_owned: int
    pages_fenced: int
    pages_quarantined: int
    out_bytes_per_s: float
    in_bytes_per_s: float
    link_bytes_per_s: float | None
    restore_bucket_fill: float | None
    host_bytes_used: int
    host_bytes_total: int
