"""The timeline: one picture of a run, a lane a request and a colour a state (extra `plot`)."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from swapkv.errors import ProtocolError
from swapkv.observe.colors import LINK_COLORS, STATE_COLORS, state_color
from swapkv.observe.figures import format_bytes, format_rate
from swapkv.observe.records import CopyRecord, Record, StepRecord
from swapkv.observe.spans import StateSpan, state_spans, time_bounds

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
except ImportError as error:
    raise ImportError("the timeline is drawn with matplotlib: pip install 'swapkv[plot]'") from error

_T = TypeVar("_T")

_METADATA: Final[dict[str, dict[str, Any]]] = {".png": {}, ".svg": {"Date": None}}
"""What each format is written with: no date, so that the same run gives the same file."""

_INK: Final = "#22262B"
_MUTED: Final = "#6B7178"
_STEPS: Final = "#8A9099"
_GRID: Final = "#E6E8EB"
_HEIGHTS: Final = {"REGISTERED": 0.10, "OFFLOADED": 0.22, "EVICTED": 0.22}
_HEIGHT_ON_DEVICE: Final = 0.62
_PASSING: Final = ("OFFLOADING", "PREFETCHING", "GPU_READY")
_BINS: Final = 480
_PIXELS: Final = 1500
_STYLE: Final[dict[Any, Any]] = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "svg.hashsalt": "swapkv",
    "axes.edgecolor": _GRID,
    "text.color": _INK,
}


@attrs.frozen(kw_only=True)
class _Run:
    """What the picture shows: of each request its states and its steps, by name in the order of the lanes."""

    states: dict[str, list[StateSpan]]
    steps: dict[str, list[StepRecord]]
    num_steps: int
    copies: tuple[CopyRecord, ...]
    origin_ns: int
    horizon_s: float

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.states)

    @property
    def pixel_s(self) -> float:
        """About the time that one pixel of the width stands for."""
        return self.horizon_s / _PIXELS

    def seconds(self, at_ns: int) -> float:
        return (at_ns - self.origin_ns) / 1e9


@attrs.frozen(kw_only=True)
class _Geometry:
    """Sizes in inches, from the number of lanes and the length of their names."""

    lanes: int
    left: float
    width: float = 12.0
    right: float = 0.3
    header: float = 1.12
    footer: float = 0.5
    link: float = 0.42
    gap: float = 0.12

    @property
    def lanes_height(self) -> float:
        return self.lanes * (0.40 if self.lanes <= 16 else max(0.12, 6.4 / self.lanes))

    @property
    def height(self) -> float:
        return self.header + self.lanes_height + 2 * (self.gap + self.link) + self.footer

    def rectangle(self, top: float, height: float) -> tuple[float, float, float, float]:
        """Figure fractions of an axes that begins `top` inches below the upper edge."""
        return (
            self.left / self.width,
            1 - (top + height) / self.height,
            (self.width - self.left - self.right) / self.width,
            height / self.height,
        )


def draw_timeline(records: Iterable[Record], path: Path, *, title: str) -> None:
    """Draws the run: requests as lanes, states as colours, steps underlined, and below the bytes/s of both links.

    Raises `ProtocolError` if no request ever had a state, and as `require_format` does.
    """
    suffix = require_format(path)
    run = _read(tuple(records))
    with matplotlib.rc_context(_STYLE):
        figure = _draw(run, title)
        figure.savefig(path, format=suffix[1:], dpi=160, metadata=_METADATA[suffix])


def require_format(path: Path) -> str:
    """The suffix of `path`: `.png` or `.svg`. Raises `ProtocolError` for another one."""
    suffix = path.suffix.lower()
    if suffix not in _METADATA:
        remedy = f"name the file {path.stem}.png or {path.stem}.svg"
        raise ProtocolError(f"the timeline {path} is not written with the suffix {path.suffix!r}: {remedy}")
    return suffix


def _read(records: Sequence[Record]) -> _Run:
    origin_ns, end_ns = time_bounds(records)
    states = _by_name((span.sequence, span) for span in state_spans(records))
    if not states:
        remedy = "run with a Recorder and hand its records over"
        raise ProtocolError(f"nothing to draw: none of {len(records)} records is a state of a request; {remedy}")
    steps = [record for record in records if isinstance(record, StepRecord)]
    return _Run(
        states=states,
        steps=_by_name((name, step) for step in steps for name in step.sequences),
        num_steps=len(steps),
        copies=tuple(record for record in records if isinstance(record, CopyRecord)),
        origin_ns=origin_ns,
        horizon_s=max((end_ns - origin_ns) / 1e9, 1e-6),
    )


def _by_name(items: Iterable[tuple[str, _T]]) -> dict[str, list[_T]]:
    grouped: dict[str, list[_T]] = {}
    for name, item in items:
        grouped.setdefault(name, []).append(item)
    return grouped


def _draw(run: _Run, title: str) -> Figure:
    longest = max(len(_elided(name)) for name in run.names)
    geometry = _Geometry(lanes=len(run.names), left=max(1.15, 0.45 + 0.075 * longest))
    figure = Figure(figsize=(geometry.width, geometry.height), facecolor="white")
    lanes = figure.add_axes(geometry.rectangle(geometry.header, geometry.lanes_height))
    _draw_lanes(lanes, run)
    _draw_header(figure, geometry, run, title)
    top = geometry.header + geometry.lanes_height
    peak = max((float(_link_rates(run, lane).max()) for lane in LINK_COLORS), default=0.0)
    for lane in LINK_COLORS:
        top += geometry.gap
        link = figure.add_axes(geometry.rectangle(top, geometry.link), sharex=lanes)
        _draw_link(link, run, lane, peak)
        top += geometry.link
    link.tick_params(labelbottom=True)
    link.set_xlabel("seconds", color=_MUTED, fontsize=8.5)
    return figure


def _draw_header(figure: Figure, geometry: _Geometry, run: _Run, title: str) -> None:
    left, height = geometry.left / geometry.width, geometry.height
    figure.text(left, 1 - 0.30 / height, title, fontsize=14, fontweight="bold", va="center", parse_math=False)
    figure.text(left, 1 - 0.57 / height, _summary(run), fontsize=9, color=_MUTED, va="center")
    figure.legend(
        handles=list(_legend_handles(run)),
        loc="center left",
        bbox_to_anchor=(left, 1 - 0.87 / height),
        ncols=len(STATE_COLORS) + 1,
        frameon=False,
        fontsize=8.5,
        labelcolor=_INK,
        handlelength=1.1,
        handleheight=0.9,
        handletextpad=0.5,
        columnspacing=1.5,
        borderpad=0,
        borderaxespad=0,
    )


def _summary(run: _Run) -> str:
    parts = [f"{len(run.names):,} requests", f"{run.num_steps:,} steps", f"{len(run.copies):,} copies"]
    for lane in LINK_COLORS:
        num_bytes = sum(copy.num_bytes for copy in run.copies if copy.lane == lane and copy.error is None)
        parts.append(f"{format_bytes(num_bytes)} {lane.lower()}")
    return "  ·  ".join(parts)


def _legend_handles(run: _Run) -> Iterator[Patch | Line2D]:
    used = {span.state for spans in run.states.values() for span in spans}
    for state, color in STATE_COLORS.items():
        if state in used and state != "FINISHED":
            yield Patch(facecolor=color, label=_label(state))
    if "FINISHED" in used:
        yield Line2D([], [], linestyle="", label="finished", marker="o", **_finish_style())
    if run.steps:
        yield Line2D([], [], color=_STEPS, linewidth=1.4, label="in a step")
    if any(copy.error is not None for copy in run.copies):
        yield Line2D(
            [], [], linestyle="", marker="x", markersize=4.5, color=STATE_COLORS["EVICTED"], label="copy failed"
        )


def _draw_lanes(axes: Axes, run: _Run) -> None:
    _prepare(axes, run)
    for row, name in enumerate(run.names):
        _draw_states(axes, run, row, run.states[name])
        _draw_steps(axes, run, row, run.steps.get(name, ()))
    axes.set_ylim(len(run.names) - 0.4, -0.6)
    labels = [_elided(name) for name in run.names]
    axes.set_yticks(range(len(labels)), labels, parse_math=False, fontsize=9 if len(labels) <= 24 else 7)
    axes.tick_params(labelbottom=False)


def _draw_states(axes: Axes, run: _Run, row: int, spans: Sequence[StateSpan]) -> None:
    """One lane. What is shorter than a pixel is drawn a pixel wide, and on top: no copy may vanish from a long run."""
    for state in dict.fromkeys(span.state for span in spans):
        begins = [run.seconds(span.begin_ns) for span in spans if span.state == state]
        widths = [(span.end_ns - span.begin_ns) / 1e9 for span in spans if span.state == state]
        color, height = state_color(state), _HEIGHTS.get(state, _HEIGHT_ON_DEVICE)
        if state == "FINISHED":
            axes.plot(begins, [row] * len(begins), "o", **_finish_style())
            continue
        ranges = [(begin, max(width, run.pixel_s)) for begin, width in zip(begins, widths, strict=True)]
        zorder = 3 if state in _PASSING else 2
        axes.broken_barh(ranges, (row - height / 2, height), facecolors=color, linewidth=0, zorder=zorder)


def _finish_style() -> dict[str, Any]:
    color = STATE_COLORS["FINISHED"]
    return {"color": color, "markersize": 6, "markeredgecolor": "white", "zorder": 5, "clip_on": False}


def _draw_steps(axes: Axes, run: _Run, row: int, steps: Sequence[StepRecord]) -> None:
    spans = _merged(((run.seconds(step.begin_ns), run.seconds(step.end_ns)) for step in steps), run.pixel_s)
    ranges = [(begin, end - begin) for begin, end in spans]
    axes.broken_barh(ranges, (row + 0.355, 0.045), facecolors=_STEPS, linewidth=0, zorder=4)


def _draw_link(axes: Axes, run: _Run, lane: str, peak: float) -> None:
    _prepare(axes, run)
    rates, edges = _link_rates(run, lane), np.linspace(0, run.horizon_s, _BINS + 1)
    axes.stairs(rates, edges, fill=True, color=LINK_COLORS[lane], zorder=2)
    failed = [run.seconds(copy.end_ns) for copy in run.copies if copy.lane == lane and copy.error is not None]
    ceiling = peak * 1.08 or 1.0
    axes.plot(failed, [ceiling / 2] * len(failed), "x", markersize=4, color=STATE_COLORS["EVICTED"], zorder=4)
    axes.set_ylim(0, ceiling)
    note = f"peak {format_rate(float(rates.max()))}" if rates.any() else "idle"
    axes.set_yticks([ceiling / 2], [f"{lane}\n{note}"], fontsize=7.5, color=_MUTED)
    axes.tick_params(labelbottom=False)


def _prepare(axes: Axes, run: _Run) -> None:
    axes.set_xlim(0, run.horizon_s * 1.005)
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelcolor=_INK)


def _link_rates(run: _Run, lane: str) -> NDArray[np.float64]:
    """Bytes/s of a link in each of `_BINS` equal bins, float64 `[_BINS]`; a copy's bytes lie evenly over its time."""
    copies = [copy for copy in run.copies if copy.lane == lane and copy.error is None]
    if not copies:
        return np.zeros(_BINS)
    begins = np.array([run.seconds(copy.begin_ns) for copy in copies])
    ends = np.maximum(np.array([run.seconds(copy.end_ns) for copy in copies]), begins + 1e-9)
    slopes = np.array([copy.num_bytes for copy in copies]) / (ends - begins)
    times = np.concatenate([begins, ends])
    order = np.argsort(times)
    times, turns = times[order], np.concatenate([slopes, -slopes])[order]
    edges = np.linspace(0, run.horizon_s, _BINS + 1)
    moved = np.concatenate([[0.0], np.cumsum(np.cumsum(turns)[:-1] * np.diff(times))])
    rates: NDArray[np.float64] = np.diff(np.interp(edges, times, moved)) / (run.horizon_s / _BINS)
    return np.maximum(rates, 0.0)


def _merged(spans: Iterable[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """The spans `(begin, end)` with those joined that lie closer than `gap`."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _label(state: str) -> str:
    return state.replace("_", " ").lower().replace("gpu", "GPU")


def _elided(name: str, limit: int = 24) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"
