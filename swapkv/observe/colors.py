"""One colour for each state, the same in the plot and on the terminal.

Any two stay apart under protanopia, deuteranopia and tritanopia, and each has a contrast of 3:1 or more on black.
Blue and green are on the device, light blue comes in, orange goes out, grey is away, violet is half away, red is lost.
"""

from typing import Final

STATE_COLORS: Final[dict[str, str]] = {
    "REGISTERED": "#D3D9E0",
    "GPU_RESIDENT": "#2A62C4",
    "OFFLOADING": "#F2A72E",
    "OFFLOADED": "#A6A49F",
    "PREFETCHING": "#4FBDF5",
    "GPU_READY": "#009A58",
    "SPILLED": "#8477A1",
    "EVICTED": "#BE1E2D",
    "FINISHED": "#565B63",
}
"""Names of `SequenceState` and `ChunkState` in the order in which a request may see them, as `#RRGGBB`."""

LINK_COLORS: Final[dict[str, str]] = {
    "OUT": STATE_COLORS["OFFLOADING"],
    "IN": STATE_COLORS["PREFETCHING"],
}
"""A link has the colour of the state that its copies put a chunk in."""

PAGE_COLORS: Final[dict[str, str]] = {
    "OWNED": STATE_COLORS["GPU_RESIDENT"],
    "FENCED": STATE_COLORS["OFFLOADING"],
    "QUARANTINED": STATE_COLORS["EVICTED"],
    "FREE": STATE_COLORS["FINISHED"],
}
"""The four places of the page ledger, in the order in which a bar shows them."""

UNKNOWN_COLOR: Final = "#B05FC9"
"""For a name that is in none of the tables."""


def state_color(state: str) -> str:
    """The colour of a state as `#RRGGBB`; a state that is not known has one too, so that pictures never fail."""
    return STATE_COLORS.get(state, UNKNOWN_COLOR)
