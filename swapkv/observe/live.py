"""The live view: a run as it goes, on the terminal."""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from swapkv.observe.colors import LINK_COLORS, PAGE_COLORS, STATE_COLORS, UNKNOWN_COLOR, state_color
from swapkv.observe.figures import NO_FIGURE, format_age, format_bytes, format_rate
from swapkv.observe.snapshot import RequestRow, RunSnapshot

REFRESH_INTERVAL_S: Final = 0.1
PLAIN_INTERVAL_S: Final = 1.0
DRAW_SHARE_MAX: Final = 0.05
CHUNK_CELLS_MAX: Final = 24

_OTHER_LINES_MAX: Final = 15
_STATE_CELLS: Final = max(map(len, STATE_COLORS))
_AGE_CELLS: Final = 7
_ON_DEVICE: Final = ("GPU_RESIDENT", "GPU_READY")
_GLYPHS: Final = {
    "GPU_RESIDENT": ("█", "#"),
    "OFFLOADING": ("▼", "v"),
    "OFFLOADED": ("░", "."),
    "PREFETCHING": ("▲", "^"),
    "GPU_READY": ("▓", "+"),
    "EVICTED": ("×", "x"),
}
"""A cell of the chunk bar, in Unicode and in ASCII: the state can be read without its colour."""


class _Terminal(Console):
    """Standard error. A reader that goes away ends the view, not the run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class LiveView:
    """Shows the latest `RunSnapshot` while it is entered, with a note below; the last one stays on the screen.

    On a terminal: a table, drawn at most every `REFRESH_INTERVAL_S`. Elsewhere: a line at most every
    `PLAIN_INTERVAL_S`. It draws in the caller's thread, and more seldom where that would take more than
    `DRAW_SHARE_MAX` of the time. `console` is standard error by default, `clock` gives seconds. A stream that fails
    ends the drawing: `update` does not raise, `failure` keeps the error.
    """

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console if console is not None else _Terminal(stderr=True)
        self._clock = clock
        self._live: Live | None = None
        self._next_at_s = -math.inf
        self._shown: RunSnapshot | None = None
        self._pending: RunSnapshot | None = None
        self._note = ""
        self.failure: Exception | None = None

    def __enter__(self) -> Self:
        if self._console.is_interactive:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
            self._guarded(self._live.start)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pending is not None:
            self._show(self._pending)
        if self._note:
            self._note = ""
            self._guarded(self._redraw)
        if self._live is not None:
            self._guarded(self._live.stop)

    def update(self, snapshot: RunSnapshot) -> None:
        """Shows `snapshot`, unless one was shown just now; leaving the view shows the last."""
        if self._clock() >= self._next_at_s:
            self._show(snapshot)
        else:
            self._pending = snapshot

    def note(self, text: str) -> None:
        """Says, at once, what goes on now; on a terminal it stays below the picture until the next note or the end."""
        if self._pending is not None:
            self._show(self._pending)
        self._note = text
        if self.failure is not None:
            return
        if self._live is None:
            self._guarded(lambda: self._print_line(f"swapkv: {text}"))
        else:
            self._guarded(self._redraw)

    def _show(self, snapshot: RunSnapshot) -> None:
        self._pending = None
        self._shown = snapshot
        if self.failure is not None:
            return
        begin_s = self._clock()
        self._guarded(self._redraw if self._live is not None else lambda: self._print_line(plain_line(snapshot)))
        interval_s = PLAIN_INTERVAL_S if self._live is None else REFRESH_INTERVAL_S
        self._next_at_s = begin_s + max(interval_s, (self._clock() - begin_s) / DRAW_SHARE_MAX)

    def _redraw(self) -> None:
        if self._live is not None:
            picture = Text() if self._shown is None else render(self._shown, self._console)
            note = [Text(), Text(self._note, no_wrap=True, overflow="ellipsis")] if self._note else []
            self._live.update(Group(picture, *note), refresh=True)

    def _print_line(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, ValueError) as error:
            self.failure = self.failure or error


def plain_line(snapshot: RunSnapshot) -> str:
    """The run in one line, for logs and pipes."""
    counts = Counter(row.state for row in snapshot.rows)
    known = [state for state in STATE_COLORS if state in counts]
    states = [f"{counts[state]} {state}" for state in [*known, *sorted(counts.keys() - STATE_COLORS.keys())]]
    tokens = sum(row.tokens for row in snapshot.rows), sum(row.target_tokens for row in snapshot.rows)
    pages = snapshot.pages_free, _pages_total(snapshot)
    return "; ".join(
        [
            f"swapkv {format_age(snapshot.elapsed_s)}: {', '.join(states) or 'no requests'}",
            f"{tokens[0]:,} of {tokens[1]:,} tokens",
            f"{pages[0]:,} of {pages[1]:,} pages free",
            f"out {format_rate(snapshot.out_bytes_per_s)}, in {format_rate(snapshot.in_bytes_per_s)}",
            f"host {format_bytes(snapshot.host_bytes_used)} of {format_bytes(snapshot.host_bytes_total)}",
        ]
    )


def render(snapshot: RunSnapshot, console: Console) -> RenderableType:
    """The table of requests and the gauges below it, sized to `console`."""
    return Group(_requests(snapshot, console), Text(), _gauges(snapshot, console), Text(), _legend(console))


def _requests(snapshot: RunSnapshot, console: Console) -> Table:
    wide = console.width >= 100
    cells = CHUNK_CELLS_MAX if wide else CHUNK_CELLS_MAX // 2
    table = Table(
        "request",
        Column("state", min_width=_STATE_CELLS),
        *(["progress"] if wide else []),
        Column("tokens", justify="right"),
        Column("preempted", justify="right"),
        Column("waiting", justify="right", min_width=_AGE_CELLS),
        "chunks",
        title=_title(snapshot),
        title_justify="left",
        header_style="dim",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for column in table.columns:
        column.no_wrap = True
    shown = _shown(snapshot.rows, max(1, console.height - _OTHER_LINES_MAX))
    for row in shown:
        table.add_row(*_request(row, console, cells))
    if len(shown) < len(snapshot.rows):
        table.add_row(Text(f"and {len(snapshot.rows) - len(shown)} more", style="dim"))
    return table


def _title(snapshot: RunSnapshot) -> Text:
    tokens, target = sum(row.tokens for row in snapshot.rows), sum(row.target_tokens for row in snapshot.rows)
    so_far = f"  {format_age(snapshot.elapsed_s)}  {tokens:,} of {target:,} tokens"
    return Text.assemble((snapshot.title, "bold"), so_far)


def _shown(rows: Sequence[RequestRow], limit: int) -> Sequence[RequestRow]:
    """The rows that fit, in their order; finished ones give way first."""
    if len(rows) <= limit:
        return rows
    by_need = sorted(range(len(rows)), key=lambda index: rows[index].state == "FINISHED")
    return [rows[index] for index in sorted(by_need[:limit])]


def _request(row: RequestRow, console: Console, cells: int) -> Iterator[RenderableType]:
    quiet = "dim" if row.state == "FINISHED" else ""
    yield Text(row.name, style="bold" if row.state in _ON_DEVICE else "dim", overflow="ellipsis")
    yield Text(row.state, style=state_color(row.state))
    if cells == CHUNK_CELLS_MAX:
        yield _bar(row.tokens, row.target_tokens, state_color(row.state), 12)
    yield Text(f"{row.tokens:,}/{row.target_tokens:,}", style=quiet)
    yield Text(f"{row.preemptions:,}" if row.preemptions else NO_FIGURE, style=quiet)
    yield Text(format_age(row.waiting_s) if row.waiting_s else NO_FIGURE, style=quiet)
    yield _chunk_bar(row.chunks, console, cells)


def _chunk_bar(chunks: Sequence[str], console: Console, cells: int) -> Text:
    """A cell a chunk. Of more chunks than cells each cell stands for a run, in the state of most of its chunks."""
    bar = Text()
    count = min(len(chunks), cells)
    for cell in range(count):
        run = chunks[cell * len(chunks) // count : (cell + 1) * len(chunks) // count]
        state = Counter(run).most_common(1)[0][0]
        bar.append(_glyph(state, console), style=state_color(state))
    if chunks:
        bar.append(f" {len(chunks):,}", style="dim")
    return bar


def _glyph(state: str, console: Console) -> str:
    unicode, ascii_only = _GLYPHS.get(state, ("?", "?"))
    return ascii_only if console.options.ascii_only else unicode


def _gauges(snapshot: RunSnapshot, console: Console) -> Table:
    width = max(10, min(40, console.width - 60))
    gauges = Table.grid(padding=(0, 2, 0, 0))
    gauges.add_row(Text("pages", style="dim"), _page_bar(snapshot, console, width), _page_counts(snapshot))
    for lane, rate in (("OUT", snapshot.out_bytes_per_s), ("IN", snapshot.in_bytes_per_s)):
        limit = snapshot.link_bytes_per_s
        of = " of " + format_rate(limit) if limit is not None else ", no limit"
        bar = _bar(rate, limit, LINK_COLORS[lane], width)
        gauges.add_row(Text(f"link {lane.lower()}", style="dim"), bar, Text(format_rate(rate) + of))
    fill = snapshot.restore_bucket_fill
    note = f"{fill:.0%} full" if fill is not None else "no limit"
    gauges.add_row(Text("restore bucket", style="dim"), _bar(fill, 1.0, STATE_COLORS["GPU_READY"], width), Text(note))
    used, total = snapshot.host_bytes_used, snapshot.host_bytes_total
    note = f"{format_bytes(used)} of {format_bytes(total)}"
    gauges.add_row(Text("host tier", style="dim"), _bar(used, total, STATE_COLORS["OFFLOADED"], width), Text(note))
    return gauges


def _bar(value: float | None, total: float | None, color: str, width: int) -> RenderableType:
    """`value` of `total`; nothing without a limit or a finite number."""
    if value is None or total is None or not math.isfinite(value) or not 0 < total < math.inf:
        return Text()
    return ProgressBar(total=total, completed=value, width=width, complete_style=color, finished_style=color)


def _page_bar(snapshot: RunSnapshot, console: Console, width: int) -> Text:
    """Widths by rounding the running sum, so that they always add up to `width`."""
    bar, total = Text(), max(1, _pages_total(snapshot))
    block, free = ("#", "-") if console.options.ascii_only else ("█", "░")
    seen = drawn = 0
    for place, count in _pages(snapshot).items():
        seen += count
        end = round(seen * width / total)
        bar.append((free if place == "FREE" else block) * (end - drawn), style=PAGE_COLORS[place])
        drawn = end
    return bar


def _page_counts(snapshot: RunSnapshot) -> Text:
    parts = [
        Text(f"{n:,} {place.lower()}", style=PAGE_COLORS[place] if n else "dim")
        for place, n in _pages(snapshot).items()
    ]
    return Text("  ").join(parts)


def _pages(snapshot: RunSnapshot) -> dict[str, int]:
    return {
        "OWNED": snapshot.pages_owned,
        "FENCED": snapshot.pages_fenced,
        "QUARANTINED": snapshot.pages_quarantined,
        "FREE": snapshot.pages_free,
    }


def _pages_total(snapshot: RunSnapshot) -> int:
    return sum(_pages(snapshot).values())


def _legend(console: Console) -> Text:
    parts = [
        Text.assemble((_glyph(state, console), STATE_COLORS.get(state, UNKNOWN_COLOR)), (f" {state}", "dim"))
        for state in _GLYPHS
    ]
    return Text("  ").join(parts)
