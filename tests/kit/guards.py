"""Takes guards out of the core, for the twins of tests: each must then fail."""

from typing import Any

import numpy as np
import pytest

from swapkv.fsm.ledger import PageLedger
from swapkv.fsm.records import Chunk
from swapkv.ids import Fence, GroupId, PhysicalPages


def readers_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageLedger, "before_read", lambda self, pages, lane: ())


def writers_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageLedger, "before_write", lambda self, pages, lane: ())


def released_pages_are_not_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is released is as if nothing had ever touched it."""

    def release(self: PageLedger, group: GroupId, pages: PhysicalPages) -> None:
        self._owner[pages] = -1
        self._last_read[:, pages] = self._last_write[:, pages] = 0
        self._put_free(group, pages)

    monkeypatch.setattr(PageLedger, "release", release)


def hazards_are_keyed_by_place_in_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads are remembered by position in what was submitted, not by physical page."""

    def note_read(self: PageLedger, fence: Fence, pages: PhysicalPages) -> None:
        self._last_read[fence.lane][np.arange(len(pages))] = fence.value

    monkeypatch.setattr(PageLedger, "note_read", note_read)


def every_copy_passes_for_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk with a host slot leaves without a look at what the slot holds."""
    monkeypatch.setattr(Chunk, "clean", property(lambda self: self.copy.offset is not None))


def truncated_chunks_keep_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken back is forgotten on the device only."""
    from swapkv.fsm import edit

    shorten = edit.shorten

    def forgetful(core: Any, chunk: Chunk, tokens: int) -> None:
        held = chunk.copy.tokens
        shorten(core, chunk, tokens)
        chunk.copy.tokens = held

    monkeypatch.setattr(edit, "shorten", forgetful)
