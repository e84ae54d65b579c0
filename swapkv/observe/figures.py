"""Bytes, rates and durations as people read them. None of these raises: what is not a finite number is a dash."""

import math
from typing import Final

from rich.filesize import decimal

NO_FIGURE: Final = "-"


def format_bytes(num_bytes: float) -> str:
    """A size in powers of 1000, as links are rated: `1.5 GB`."""
    if not math.isfinite(num_bytes):
        return NO_FIGURE
    sign = "-" if num_bytes < 0 else ""
    return sign + decimal(abs(round(num_bytes)))


def format_rate(bytes_per_s: float | None) -> str:
    """A rate in bytes/s: `12.3 GB/s`; None is no limit: `unlimited`."""
    if bytes_per_s is None:
        return "unlimited"
    size = format_bytes(bytes_per_s)
    return size if size == NO_FIGURE else f"{size}/s"


def format_duration(seconds: float) -> str:
    """A duration with the unit that fits it: `850 µs`, `12.3 ms`, `4.2 s`, `2 min 05 s`, `1 h 05 min`."""
    if not math.isfinite(seconds) or abs(seconds) >= 0.99995:
        return format_age(seconds)
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms"


def format_age(seconds: float) -> str:
    """A duration that keeps growing, so that it keeps its unit: `0.7 s`, `42.0 s`, `2 min 05 s`, `1 h 05 min`."""
    if not math.isfinite(seconds):
        return NO_FIGURE
    sign, seconds = ("-" if seconds < 0 else ""), abs(seconds)
    if seconds < 59.95:
        return f"{sign}{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{sign}{minutes} min {rest:02d} s"
    return f"{sign}{minutes // 60} h {minutes % 60:02d} min"
