"""A report as people read it."""

from collections.abc import Iterator
from statistics import median

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from swapkv.demo.report import Report, quantile
from swapkv.demo.run import RunResult
from swapkv.demo.scenario import Mode
from swapkv.demo.ways import Way
from swapkv.observe.figures import format_bytes, format_duration

CONTINUATION_CHARS = 320
NOISE_CHARS = 48
WIDE = 100
SPREAD_MAX = 0.1
MEANINGS = {
    "idle s": "seconds in which nothing could run because all waited for swaps",
    "recomputed": "tokens whose KV was there and was computed once more",
    "exact": "requests with the twin's tokens and KV bytes; what is recomputed rounds differently",
}


def print_report(report: Report, console: Console) -> None:
    """What was generated, how fast, and whether it is exact: the verdict comes last."""
    console.print()
    _print_texts(report, console)
    if report.timed:
        _print_rates(report, console)
    _print_proof(report, console)


def _print_texts(report: Report, console: Console) -> None:
    decoder, note = report.workload.decoder, report.workload.text_note
    _heading(console, f"What {decoder.name} wrote", note or "greedily: each prompt, and below it what followed")
    width = max(len(name) for name in report.swapped.outputs)
    table = Table.grid(
        Column(style="dim", no_wrap=True, min_width=width),
        Column(no_wrap=note is not None),
        padding=(0, 2, 0, 0),
    )
    prompts = report.workload.scenario.prompts()
    for prompt, (name, tokens) in zip(prompts, report.swapped.outputs.items(), strict=True):
        text = " ".join(decoder.decode(tokens).split())
        if note is None:
            written = Text.assemble((prompt, "bold"), "\n", _cut(text, CONTINUATION_CHARS), "\n")
        else:
            written = Text.assemble((prompt, "bold"), "  ", (text, "dim"), overflow="ellipsis")
            written.truncate(min(len(prompt) + NOISE_CHARS, console.width - width - 6), overflow="ellipsis")
        table.add_row(name, written)
    console.print(_indented(table))
    if note is not None:
        console.print()


def _print_rates(report: Report, console: Console) -> None:
    scenario = report.workload.scenario
    times = "once" if scenario.repeats == 1 else f"{scenario.repeats} times, in turn; medians"
    _heading(console, "How fast", f"the same machine, unobserved, each way {times}")
    columns = (
        "tokens/s",
        "from-to" if scenario.repeats > 1 else "",
        "of ceiling",
        "time s",
        "idle s",
        "recomputed",
        "exact",
    )
    table = Table(
        Column("", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in columns),
        box=None,
        header_style="dim",
        padding=(0, 2 if console.width >= WIDE else 1, 0, 0),
        pad_edge=False,
    )
    legend = Table.grid(Column(no_wrap=True), Column(style="dim"), padding=(0, 2, 0, 0))
    for way in report.timed:
        table.add_row(*_rates(report, way))
        legend.add_row(way.value, way.what(scenario))
    for column, meaning in MEANINGS.items():
        legend.add_row(column, meaning)
    console.print(_indented(table))
    for doubt in _doubts(report):
        console.print(_indented(Text(doubt, "yellow")))
    console.print()
    console.print(_indented(legend))
    console.print()


def _rates(report: Report, way: Way) -> Iterator[Text | str]:
    runs = report.timed[way]
    rates = sorted(run.tokens_per_s for run in runs)
    yield way.value
    yield Text(f"{report.tokens_per_s(way):.0f}", "bold")
    yield Text(f"{rates[0]:.0f}-{rates[-1]:.0f}" if len(rates) > 1 else "", "dim")
    yield f"{report.share_of_ceiling(way):.0%}"
    yield f"{median(run.wall_s for run in runs):.1f}"
    yield f"{median(run.idle_s for run in runs):.1f}"
    yield f"{round(median(run.recomputed_tokens for run in runs)):,}"
    yield f"{min(report.exact_requests(run) for run in runs)} of {way.requests(report.workload.scenario)}"


def _doubts(report: Report) -> Iterator[str]:
    """What a reader should know before believing the rates."""
    rates = [[run.tokens_per_s for run in runs] for runs in report.timed.values()]
    spread = max(max(same) / min(same) - 1 for same in rates)
    if spread > SPREAD_MAX:
        yield f"Runs of the same way differ by up to {spread:.0%}: something else was using this machine."
    if any((report.share_of_ceiling(way) or 0) > 1 + SPREAD_MAX for way in report.timed):
        yield "A way that beats its ceiling was only lucky: run it again while the machine is quiet."


def _print_proof(report: Report, console: Console) -> None:
    _heading(console, "The proof", "against a twin with room for all requests, never preempted")
    console.print(_indented(Text(_work_done(report))))
    for name in report.swapped.outputs:
        for difference in report.differences(report.swapped, name):
            console.print(_indented(Text(f"{name}: {difference}", "red")))
    console.print()
    console.print(_verdict(report))


def _work_done(report: Report) -> str:
    swapped, stats = report.swapped, report.swapped.statistics
    if report.workload.scenario.mode is Mode.STREAM:
        return _streamed(swapped)
    if not swapped.preemptions:
        return "Nobody was preempted: give more --requests than --gpu-slots, and a --quantum below --new-tokens."
    text = (
        f"{swapped.preemptions:,} preemptions moved {format_bytes(stats.out.bytes_copied)} out and "
        f"{format_bytes(stats.into.bytes_copied)} in; another "
        f"{format_bytes(stats.counters.get('clean_bytes_kept', 0))} had a clean copy and left without being copied."
    )
    middle, high = quantile(swapped.restores_s, 0.5), quantile(swapped.restores_s, 0.95)
    if middle is not None and high is not None:
        text += (
            f" From the scheduler's word to the last layer a restore took {format_duration(middle)} "
            f"(95th percentile {format_duration(high)})."
        )
    return text


def _streamed(run: RunResult) -> str:
    spills = run.statistics.counters.get("spills", 0)
    if not spills:
        return "Nothing had to be streamed: give more --requests than --gpu-slots, and more --new-tokens."
    return (
        f"All {len(run.outputs)} requests took part in every one of {run.steps:,} steps. {spills:,} spills moved "
        f"{format_bytes(run.statistics.out.bytes_copied)} out once; forwards read {format_bytes(run.streamed_bytes)} in "
        f"host memory ({format_bytes(run.streamed_bytes // run.steps)} a step) through a ring of "
        f"{format_bytes(run.ring_bytes)}, which is part of the slots' memory."
    )


def _verdict(report: Report) -> Text:
    parts = [
        Text("tokens equal", "green") if report.tokens_equal else Text("tokens DIFFERENT", "bold red"),
        Text("KV bytes equal", "green") if report.bytes_equal else Text("KV bytes DIFFERENT", "bold red"),
        Text(f"{report.swapped.recomputed_tokens:,} tokens recomputed"),
    ]
    word = Text("EXACT: ", "bold green") if report.equal else Text("NOT EXACT: ", "bold red")
    return word + Text(", ").join(parts)


def _heading(console: Console, title: str, note: str) -> None:
    console.print(Text.assemble((title, "bold"), (f"  {note}", "dim")))


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"
