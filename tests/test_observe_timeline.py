"""The timeline draws what the records say; its colours can be told apart."""

import importlib
import re
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from swapkv.errors import ProtocolError
from swapkv.observe.colors import LINK_COLORS, STATE_COLORS, UNKNOWN_COLOR, state_color
from swapkv.observe.records import CopyRecord, Record, StateRecord, StepRecord
from swapkv.observe.timeline import draw_timeline

SECOND = 1_000_000_000

DICHROMACIES = {
    "none": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
"""Linear RGB as seen, from G. M. Machado et al., "A physiologically-based model for simulation of color vision
deficiency", IEEE TVCG 15(6), 2009, at severity 1."""

LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
"""Linear RGB to OKLab, from B. Ottosson, https://bottosson.github.io/posts/oklab/."""


def linear(color: str) -> NDArray[np.float64]:
    encoded = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def oklab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    lab: NDArray[np.float64] = LAB @ np.cbrt(LMS @ np.clip(rgb, 0, 1))
    return lab


def records() -> list[Record]:
    """Two requests and one slot, 4 s: "a$x$" runs, goes out (1 GB in 1 s), "b" runs, and a copy fails."""
    changes = [
        (0.0, "a$x$", "REGISTERED"),
        (0.0, "a$x$", "GPU_RESIDENT"),
        (0.0, "b", "REGISTERED"),
        (1.0, "a$x$", "OFFLOADING"),
        (2.0, "a$x$", "OFFLOADED"),
        (2.0, "b", "GPU_RESIDENT"),
        (3.0, "b", "FINISHED"),
        (3.0, "a$x$", "PREFETCHING"),
        (4.0, "a$x$", "OFFLOADED"),
    ]
    found: list[Record] = [StateRecord(at_ns=int(t * SECOND), sequence=name, state=s) for t, name, s in changes]
    found += [StepRecord(begin_ns=i * SECOND // 10, end_ns=(i + 1) * SECOND // 10, sequences=("b",)) for i in range(9)]
    return [*found, copy(1, 2, "OUT", None), copy(3, 4, "IN", "cudaErrorUnknown")]


def copy(begin_s: int, end_s: int, lane: str, error: str | None) -> CopyRecord:
    return CopyRecord(
        begin_ns=begin_s * SECOND,
        end_ns=end_s * SECOND,
        lane=lane,
        op=begin_s,
        num_bytes=10**9,
        chunks=3,
        sequences=("a$x$",),
        error=error,
    )


def texts(svg: str) -> set[str]:
    """The texts of the picture: they are drawn as paths, each after a comment that holds it."""
    return {line for text in re.findall(r"<!-- (.*?) -->", svg, re.DOTALL) for line in text.split("\n")}


def test_timeline_as_svg_names_requests_states_and_links(tmp_path: Path) -> None:
    path = tmp_path / "run.svg"
    draw_timeline(records(), path, title="two requests, one slot")
    shown = texts(path.read_text("utf-8"))
    assert {"two requests, one slot", "a$x$", "b", "seconds"} <= shown
    assert {"registered", "GPU resident", "offloading", "offloaded", "prefetching", "finished"} <= shown
    assert {"in a step", "copy failed", "OUT", "IN"} <= shown
    assert "evicted" not in shown
    assert "2 requests  ·  9 steps  ·  2 copies  ·  1.0 GB out  ·  0 bytes in" in shown


def test_timeline_shows_link_rates_of_copies_that_succeeded(tmp_path: Path) -> None:
    path = tmp_path / "run.svg"
    draw_timeline(records(), path, title="t")
    assert {"peak 1.0 GB/s", "idle"} <= texts(path.read_text("utf-8"))


def test_timeline_paints_states_and_links_in_the_palette(tmp_path: Path) -> None:
    path = tmp_path / "run.svg"
    draw_timeline(records(), path, title="t")
    svg = path.read_text("utf-8").upper()
    used = [color for state, color in STATE_COLORS.items() if state not in ("GPU_READY", "EVICTED", "SPILLED")]
    assert all(color in svg for color in [*used, *LINK_COLORS.values()])
    assert STATE_COLORS["GPU_READY"] not in svg


def test_timeline_as_png_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "run.PNG"
    draw_timeline(iter(records()), path, title="t")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_timeline_of_the_same_records_is_the_same_file(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        draw_timeline(records(), tmp_path / name, title="t")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_timeline_of_one_moment_and_an_unknown_state_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run.svg"
    draw_timeline([StateRecord(at_ns=5, sequence="a" * 60, state="NOVEL")], path, title="t")
    assert UNKNOWN_COLOR in path.read_text("utf-8").upper()


@pytest.mark.parametrize("name", ["run.pdf", "run"])
def test_timeline_with_another_suffix_is_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProtocolError, match=rf"suffix '{Path(name).suffix}': name the file run\.png or run\.svg"):
        draw_timeline(records(), tmp_path / name, title="t")
    assert not list(tmp_path.iterdir())


def test_timeline_without_states_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="none of 1 records is a state of a request"):
        draw_timeline([copy(0, 1, "OUT", None)], tmp_path / "run.png", title="t")


def test_timeline_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "swapkv.observe.timeline")
    with pytest.raises(ImportError, match=r"pip install 'swapkv\[plot\]'"):
        importlib.import_module("swapkv.observe.timeline")


@pytest.mark.parametrize("vision", DICHROMACIES)
def test_state_colors_stay_apart_for_every_kind_of_vision(vision: str) -> None:
    seen = {state: oklab(DICHROMACIES[vision] @ linear(color)) for state, color in STATE_COLORS.items()}
    for first, second in combinations(seen, 2):
        assert np.linalg.norm(seen[first] - seen[second]) > 0.075, (first, second)


@pytest.mark.parametrize("color", STATE_COLORS.values())
def test_state_colors_have_contrast_on_a_black_terminal(color: str) -> None:
    luminance = float(linear(color) @ np.array([0.2126, 0.7152, 0.0722]))
    assert (luminance + 0.05) / 0.05 >= 3


def test_state_color_of_an_unknown_state_is_one_of_its_own() -> None:
    assert state_color("NOVEL") == UNKNOWN_COLOR not in STATE_COLORS.values()
