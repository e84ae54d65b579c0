"""What `swapkv bench attention` prints and draws."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from swapkv.bench.attention import Measured, Way
from swapkv.bench.attention_selected import MOST

_BAR_COLOR, _IDEAL_COLOR = "#4c78a8", "#e45756"


def print_measured(measured: Measured, console: Console) -> None:
    """A table of the ways, and why the roofline chose as it did."""
    case = measured.case
    console.print(
        f"{case.context:,} tokens, {case.heads} heads over {case.kv_heads}, head_dim {case.head_dim}, {case.layers} layers; "
        f"{case.host_bytes / 1e6:,.1f} MB of KV in host memory, a link of {measured.link_bytes_per_s / 1e6:,.0f} MB/s.\n"
        f"Computing takes {measured.compute_s * 1e3:.1f} ms, the link {measured.copy_s * 1e3:.1f} ms; "
        f"ideal: {measured.ideal_s * 1e3:.1f} ms."
    )
    table = Table("way", "ms a step", "of the ideal", "overlap", "MB over the link", "bits")
    for way, seconds in measured.step_s.items():
        table.add_row(
            way.value,
            f"{seconds * 1e3:.1f}",
            f"{seconds / measured.ideal_s:.2f}",
            f"{measured.overlap(way):.2f}",
            f"{measured.bytes_over_link[way] / 1e6:,.1f}",
            "equal" if measured.bitwise_equal[way] else "DIFFERENT",
        )
    console.print(table)
    console.print(f"A streamed step waited {measured.stalled_s * 1e3:.1f} ms for its link.")
    for choice in measured.choices[:1]:
        console.print(f"The roofline's choice, from measured rates: {choice.why}.", highlight=False)
    if measured.selected:
        _print_selected(measured, console)


def _print_selected(measured: Measured, console: Console) -> None:
    weights = "; ".join(f"{data.value}: {share:.0%}" for data, share in measured.most_in.items())
    console.print(
        f"Pages selected by their key bounds, approximate: a share of all, the MB that cross the link, the exact weight seen, "
        f"the relative error. Tokens that hold {MOST:.0%} of a head's weight: {weights}."
    )
    table = Table("keys", "pages", "ms a step", "of stream", "MB", "weight", "error")
    table.columns[0].no_wrap = True
    for row in measured.selected:
        table.add_row(
            row.selection.data.value,
            f"{row.selection.share:.1%}",
            f"{row.step_s * 1e3:.1f}",
            f"{row.step_s / measured.step_s[Way.STREAM]:.2f}",
            f"{row.bytes_over_link / 1e6:,.1f}",
            f"{row.weight_seen:.1%}",
            f"{row.relative_error:.3f}",
        )
    console.print(table)


def draw_measured(measured: Measured, path: Path) -> None:
    """A bar for each way, and a line for the ideal. Raises `ImportError` without the extra `plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture is drawn with matplotlib: pip install 'swapkv[plot]'") from error
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    ways = list(Way)[::-1]
    axes.barh([way.value for way in ways], [measured.step_s[way] * 1e3 for way in ways], color=_BAR_COLOR)
    axes.axvline(measured.ideal_s * 1e3, color=_IDEAL_COLOR, linestyle="--", label="max(computing, link)")
    axes.set_xlabel("ms a decode step")
    axes.set_title(
        f"{measured.case.context:,} tokens, {measured.case.fraction:.0%} of their KV in host memory", fontsize=11
    )
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
