"""The live view shows the run, keeps its rates, and never fails the run that it shows."""

import io
import math
import sys
from collections.abc import Callable

import attrs
import pytest
from rich.color import Color
from rich.console import Console

from swapkv.observe.colors import STATE_COLORS
from swapkv.observe.figures import format_age, format_bytes, format_duration, format_rate
from swapkv.observe.live import LiveView, plain_line, render
from swapkv.observe.snapshot import RequestRow, RunSnapshot

RUNNING = RequestRow(
    name="req-0",
    state="GPU_RESIDENT",
    chunks=("GPU_RESIDENT",) * 5,
    tokens=1200,
    target_tokens=4096,
    preemptions=0,
    waiting_s=0.0,
)
WAITING = RequestRow(
    name="req-1",
    state="OFFLOADING",
    chunks=("OFFLOADED", "OFFLOADED", "OFFLOADING"),
    tokens=700,
    target_tokens=700,
    preemptions=3,
    waiting_s=2.5,
)
SNAPSHOT = RunSnapshot(
    title="2 requests on 1 GPU slots",
    elapsed_s=12.4,
    rows=(RUNNING, WAITING),
    pages_free=10,
    pages_owned=25,
    pages_fenced=4,
    pages_quarantined=1,
    out_bytes_per_s=3.1e9,
    in_bytes_per_s=11.2e9,
    link_bytes_per_s=12e9,
    restore_bucket_fill=0.42,
    host_bytes_used=3_000_000_000,
    host_bytes_total=8_000_000_000,
)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class SlowStream(io.StringIO):
    """A stream that takes `seconds` for each write."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self._clock, self._seconds = clock, seconds

    def write(self, text: str, /) -> int:
        self._clock.now_s += self._seconds
        return super().write(text)


class BrokenStream(io.StringIO):
    """A stream whose reader has gone away."""

    def write(self, text: str, /) -> int:
        raise OSError("no space left on device")


def terminal(width: int = 120, height: int = 40) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=width, height=height)


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(snapshot: RunSnapshot, width: int = 120, height: int = 40) -> list[str]:
    """The lines of the picture, without colours."""
    console = terminal(width, height)
    lines = console.render_lines(render(snapshot, console), console.options)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def line_with(word: str, lines: list[str]) -> str:
    [line] = [line for line in lines if line.startswith(word)]
    return line


def test_view_shows_a_row_a_request() -> None:
    lines = shown(SNAPSHOT)
    assert lines[0] == "2 requests on 1 GPU slots  12.4 s  1,900 of 4,796 tokens"
    assert line_with("req-0", lines).split()[:2] == ["req-0", "GPU_RESIDENT"]
    assert line_with("req-0", lines).split()[-5:] == ["1,200/4,096", "-", "-", "█████", "5"]
    assert line_with("req-1", lines).split()[:2] == ["req-1", "OFFLOADING"]
    assert line_with("req-1", lines).split()[-6:] == ["700/700", "3", "2.5", "s", "░░▼", "3"]


def test_view_columns_stay_where_they_are_when_states_change() -> None:
    later = attrs.evolve(WAITING, state="GPU_RESIDENT", waiting_s=0.0, chunks=("GPU_RESIDENT",) * 9)
    pictures = [shown(attrs.evolve(SNAPSHOT, rows=(WAITING,))), shown(attrs.evolve(SNAPSHOT, rows=(later,)))]
    assert pictures[0][1] == pictures[1][1]


def test_view_shows_pages_links_bucket_and_host() -> None:
    lines = shown(SNAPSHOT)
    assert "█" * 30 + "░" * 10 in line_with("pages", lines)
    assert line_with("pages", lines).endswith("25 owned  4 fenced  1 quarantined  10 free")
    assert line_with("link out", lines).endswith("3.1 GB/s of 12.0 GB/s")
    assert line_with("link in", lines).endswith("11.2 GB/s of 12.0 GB/s")
    assert line_with("restore bucket", lines).endswith("42% full")
    assert line_with("host tier", lines).endswith("3.0 GB of 8.0 GB")


def test_view_without_limits_says_so_and_draws_no_bar() -> None:
    lines = shown(attrs.evolve(SNAPSHOT, link_bytes_per_s=None, restore_bucket_fill=None))
    assert line_with("link in", lines).split(maxsplit=2)[2] == "11.2 GB/s, no limit"
    assert line_with("restore bucket", lines).split(maxsplit=2)[2] == "no limit"


def test_view_scales_long_chunk_bars_down() -> None:
    chunks = ("GPU_READY",) * 50 + ("PREFETCHING",) * 50
    lines = shown(attrs.evolve(SNAPSHOT, rows=(attrs.evolve(RUNNING, chunks=chunks),)))
    assert line_with("req-0", lines).split()[-2:] == ["▓" * 12 + "▲" * 12, "100"]


def test_view_with_more_requests_than_lines_drops_finished_ones_first() -> None:
    rows = [attrs.evolve(RUNNING, name=f"r{i:02}", state="FINISHED" if i < 8 else "OFFLOADED") for i in range(20)]
    lines = shown(attrs.evolve(SNAPSHOT, rows=tuple(rows)), width=90, height=27)
    assert [line[:3] for line in lines if line.startswith("r") and line[1].isdigit()] == [
        f"r{i:02}" for i in range(8, 20)
    ]
    assert line_with("and", lines) == "and 8 more"
    assert len(lines) <= 27 - 2


@pytest.mark.parametrize("width", [1, 20, 80, 300])
def test_view_fits_any_width(width: int) -> None:
    assert all(len(line) <= width for line in shown(SNAPSHOT, width=width))


def test_view_in_ascii_tells_states_by_their_letters() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with LiveView(Console(file=stream, force_terminal=True, color_system=None, width=120, height=40)) as view:
        view.update(SNAPSHOT)
    stream.flush()
    assert view.failure is None
    assert b"#####" in raw.getvalue()
    assert b"..v" in raw.getvalue()


def test_view_colors_states_from_the_palette() -> None:
    console = terminal()
    with LiveView(console) as view:
        view.update(SNAPSHOT)
    red, green, blue = Color.parse(STATE_COLORS["OFFLOADING"]).get_truecolor()
    assert f"38;2;{red};{green};{blue}mOFFLOADING" in written(console)


def test_view_shows_at_most_ten_pictures_a_second() -> None:
    console, clock = terminal(), Clock()
    with LiveView(console, clock=clock) as view:
        view.update(SNAPSHOT)
        before = written(console)
        for _ in range(9):
            clock.now_s += 0.01
            view.update(SNAPSHOT)
        assert written(console) == before
        clock.now_s += 0.02
        view.update(SNAPSHOT)
        assert written(console) != before


def test_view_that_is_slow_to_draw_draws_more_seldom() -> None:
    clock = Clock()
    console = Console(file=SlowStream(clock, 0.5), force_terminal=False, width=80)
    with LiveView(console, clock=clock) as view:
        view.update(SNAPSHOT)
        before, begin_s = written(console), clock.now_s - 0.5
        clock.now_s = begin_s + 9.5
        view.update(SNAPSHOT)
        assert written(console) == before
        clock.now_s = begin_s + 10.5
        view.update(SNAPSHOT)
        assert written(console) != before


@pytest.mark.parametrize("make", [terminal, pipe])
def test_view_that_is_left_shows_the_last_snapshot(make: Callable[[], Console]) -> None:
    console = make()
    with LiveView(console, clock=Clock()) as view:
        view.update(SNAPSHOT)
        view.update(attrs.evolve(SNAPSHOT, elapsed_s=98.7))
    assert "1 min 39 s" in written(console)


def test_view_note_stands_below_the_picture_until_the_view_is_left() -> None:
    console, clock = terminal(), Clock()
    with LiveView(console, clock=clock) as view:
        view.note("before the first picture")
        view.update(SNAPSHOT)
        view.update(attrs.evolve(SNAPSHOT, elapsed_s=13.0))
        view.note("now [bold]this\nand that")
        noted = written(console)
        assert "  13.0 s" in noted
    assert "before the first picture" in noted
    assert "now [bold]this" in noted
    assert "now" not in written(console)[len(noted) :]


def test_view_note_longer_than_the_line_is_cut() -> None:
    console = terminal(width=80)
    with LiveView(console) as view:
        view.note("x" * 100)
    assert "x" * 79 + "…" in written(console)


def test_view_on_a_pipe_writes_a_note_as_a_line() -> None:
    console = pipe()
    with LiveView(console, clock=Clock()) as view:
        view.update(SNAPSHOT)
        view.update(attrs.evolve(SNAPSHOT, elapsed_s=13.0))
        view.note("on to the twin")
    assert [line.split(":")[0] for line in written(console).splitlines()] == [
        "swapkv 12.4 s",
        "swapkv 13.0 s",
        "swapkv",
    ]
    assert written(console).endswith("swapkv: on to the twin\n")


def test_view_on_a_pipe_writes_a_plain_line_a_second() -> None:
    console, clock = pipe(), Clock()
    with LiveView(console, clock=clock) as view:
        for quarter in range(11):
            view.update(attrs.evolve(SNAPSHOT, elapsed_s=quarter / 4))
            clock.now_s += 0.25
    lines = written(console).splitlines()
    assert [line.split(":")[0] for line in lines] == ["swapkv 0.0 s", "swapkv 1.0 s", "swapkv 2.0 s", "swapkv 2.5 s"]
    assert "\x1b" not in written(console)


def test_plain_line_tells_the_whole_run() -> None:
    assert plain_line(SNAPSHOT) == (
        "swapkv 12.4 s: 1 GPU_RESIDENT, 1 OFFLOADING; 1,900 of 4,796 tokens; 10 of 40 pages free; "
        "out 3.1 GB/s, in 11.2 GB/s; host 3.0 GB of 8.0 GB"
    )


def test_view_is_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView() as view:
        view.update(SNAPSHOT)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "1 OFFLOADING" in captured.err


@pytest.mark.parametrize("force_terminal", [True, False])
def test_view_whose_stream_fails_keeps_the_error_and_raises_nothing(*, force_terminal: bool) -> None:
    clock, streams = Clock(), (sys.stdout, sys.stderr)
    with LiveView(Console(file=BrokenStream(), force_terminal=force_terminal), clock=clock) as view:
        view.update(SNAPSHOT)
        clock.now_s += 10
        view.update(SNAPSHOT)
        view.note("still here")
    assert isinstance(view.failure, OSError)
    assert (sys.stdout, sys.stderr) == streams


def test_view_of_odd_figures_raises_nothing() -> None:
    odd = attrs.evolve(
        RUNNING, name="[bold]x", state="NOVEL", chunks=("NOVEL",), target_tokens=0, waiting_s=math.inf, tokens=-1
    )
    snapshot = attrs.evolve(
        SNAPSHOT,
        rows=(odd,),
        pages_free=0,
        pages_owned=0,
        pages_fenced=0,
        pages_quarantined=0,
        out_bytes_per_s=math.nan,
        link_bytes_per_s=0.0,
        restore_bucket_fill=math.inf,
        host_bytes_total=0,
    )
    lines = shown(snapshot)
    assert line_with("[bold]x", lines).split()[1] == "NOVEL"
    assert line_with("[bold]x", lines).split()[-2:] == ["?", "1"]
    assert line_with("link out", lines).split()[2] == "-"
    assert "1 NOVEL" in plain_line(snapshot)


def test_view_passes_on_what_its_body_raises() -> None:
    with pytest.raises(KeyError), LiveView(pipe()):
        raise KeyError


@pytest.mark.parametrize(
    ("seconds", "duration", "age"),
    [
        (0, "0 s", "0.0 s"),
        (850e-6, "850 µs", "0.0 s"),
        (0.0123, "12.3 ms", "0.0 s"),
        (4.2, "4.2 s", "4.2 s"),
        (59.96, "1 min 00 s", "1 min 00 s"),
        (3900, "1 h 05 min", "1 h 05 min"),
        (-3, "-3.0 s", "-3.0 s"),
        (math.nan, "-", "-"),
    ],
)
def test_durations_have_the_unit_that_fits(seconds: float, duration: str, age: str) -> None:
    assert (format_duration(seconds), format_age(seconds)) == (duration, age)


@pytest.mark.parametrize(
    ("num_bytes", "size", "rate"),
    [
        (0, "0 bytes", "0 bytes/s"),
        (1.5e9, "1.5 GB", "1.5 GB/s"),
        (-5e6, "-5.0 MB", "-5.0 MB/s"),
        (math.inf, "-", "-"),
    ],
)
def test_sizes_and_rates_are_in_powers_of_1000(num_bytes: float, size: str, rate: str) -> None:
    assert (format_bytes(num_bytes), format_rate(num_bytes)) == (size, rate)


def test_rate_of_none_is_unlimited() -> None:
    assert format_rate(None) == "unlimited"
