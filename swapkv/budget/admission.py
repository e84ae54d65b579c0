"""What a sequence needs at its peak, and whether the pool can ever hold it."""

from collections.abc import Sequence

import attrs

from swapkv.config import HostFull
from swapkv.errors import NeverFits
from swapkv.ids import GroupId, SeqId
from swapkv.layout import KVLayout


@attrs.frozen(kw_only=True)
class Need:
    """The peak of one sequence: `pages` by layer group, `host_bytes` in the host tier when it is preempted."""

    pages: tuple[int, ...]
    host_bytes: int


def peak_need(layout: KVLayout, max_tokens: int, step_tokens: int) -> Need:
    """The most that a sequence takes while it grows to `max_tokens` by at most `step_tokens` a step."""
    groups = [GroupId(g) for g in range(len(layout.groups))]
    pages = tuple(layout.peak_pages(g, max_tokens, step_tokens) for g in groups)
    host_bytes = 0
    for group in groups:
        chunks = -(-max_tokens // layout.chunk_tokens)
        if layout.groups[group].window is not None:
            chunks = min(chunks, -(-pages[group] // layout.chunk_pages) + 1)
        host_bytes += chunks * layout.chunk_bytes(group)
    return Need(pages=pages, host_bytes=host_bytes)


def need_while_shared(layout: KVLayout, need: Need) -> Need:
    """What a sequence takes that shares chunks with a fork: in a windowed group, pages of a shared chunk stay until all
    of the chunk is behind the window.
    """
    kept = layout.chunk_pages - 1
    windows = (group.window for group in layout.groups)
    pages = tuple(n if window is None else n + kept for n, window in zip(need.pages, windows, strict=True))
    return attrs.evolve(need, pages=pages)


def refuse_what_never_fits(
    sequence: SeqId, need: Need, pages_total: Sequence[int], host_bytes_total: int, host_full: HostFull
) -> None:
    """Raise `NeverFits`, naming the need and the limit, for a sequence that the pool could not hold even alone."""
    for group, (needed, total) in enumerate(zip(need.pages, pages_total, strict=True)):
        if needed > total:
            raise NeverFits(
                f"sequence {sequence!r} needs {needed} pages of layer group {group} at its peak, the pool has {total}: "
                "lower max_tokens or step_tokens, or give the pool more pages"
            )
    if host_full is HostFull.REFUSE and need.host_bytes > host_bytes_total:
        raise NeverFits(
            f"sequence {sequence!r} needs {need.host_bytes} bytes of host memory when preempted, the tier has "
            f"{host_bytes_total}: raise host_bytes, lower max_tokens, or set host_full=RECOMPUTE"
        )
