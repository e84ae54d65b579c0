"""What the demo found, for people and for programs."""

from collections.abc import Sequence

import attrs
from rich.console import Console
from rich.table import Table

from swapkv.demo.run import RunResult
from swapkv.demo.scenario import Workload
from swapkv.observe.figures import format_bytes, format_duration


@attrs.frozen(kw_only=True)
class Report:
    """The run under test, its twin with room for all, and timed runs of the same machine (None: not run).

    `timed`: the run under test once more, unobserved, as the three others are.
    """

    workload: Workload
    swapped: RunResult
    twin: RunResult
    timed: RunResult | None = None
    ceiling: RunResult | None = None
    stopped: RunResult | None = None
    recomputed: RunResult | None = None

    @property
    def tokens_equal(self) -> bool:
        return self.swapped.outputs == self.twin.outputs

    @property
    def bytes_equal(self) -> bool:
        """Whether every request ended with the KV, byte for byte, that it has without swapping."""
        return self.swapped.kv_digests == self.twin.kv_digests

    @property
    def equal(self) -> bool:
        return self.tokens_equal and self.bytes_equal

    def as_json(self) -> dict[str, object]:
        """One object; `headline` holds the figures that the README quotes."""
        scenario, stats = self.workload.scenario, self.swapped.statistics
        return {
            "headline": {
                "tokens_equal": self.tokens_equal,
                "bytes_equal": self.bytes_equal,
                "recomputed_tokens": self.swapped.recomputed_tokens,
                "preemptions": self.swapped.preemptions,
                "tokens_per_s": (self.timed or self.swapped).tokens_per_s,
                "ceiling_tokens_per_s": _rate(self.ceiling),
                "stop_the_world_tokens_per_s": _rate(self.stopped),
                "recompute_tokens_per_s": _rate(self.recomputed),
            },
            "model": self.workload.decoder.name,
            "scenario": attrs.asdict(scenario, value_serializer=lambda _i, _a, v: getattr(v, "value", v)),
            "device_pages": self.workload.pages(scenario.gpu_slots),
            "bytes_out": stats.out.bytes_copied,
            "bytes_in": stats.into.bytes_copied,
            "clean_bytes_kept": stats.counters.get("clean_bytes_kept", 0),
            "restore_stall_p50_s": quantile(self.swapped.stalls_s, 0.5),
            "restore_stall_p95_s": quantile(self.swapped.stalls_s, 0.95),
            "wall_s": self.swapped.wall_s,
            "counters": dict(stats.counters),
            "requests": [
                {"name": name, "tokens": len(tokens), "text": self.workload.decoder.decode(tokens)}
                for name, tokens in self.swapped.outputs.items()
            ],
        }

    def print(self, console: Console) -> None:
        """The same for people."""
        self._print_requests(console)
        if self.timed is not None:
            self._print_rates(console)
        stats, swapped = self.swapped.statistics, self.swapped
        stalls = [format_duration(quantile(swapped.stalls_s, q)) for q in (0.5, 0.95)]
        console.print(
            f"{swapped.preemptions} preemptions moved {format_bytes(stats.out.bytes_copied)} out and "
            f"{format_bytes(stats.into.bytes_copied)} in; {format_bytes(stats.counters.get('clean_bytes_kept', 0))} were "
            f"clean and stayed. A restore took {stalls[0]} (median), {stalls[1]} (95th percentile). "
            f"{swapped.recomputed_tokens} tokens were recomputed."
        )
        verdict = {True: "[green]equal[/green]", False: "[bold red]DIFFERENT[/bold red]"}
        console.print(
            f"Against the same requests with room for all: tokens {verdict[self.tokens_equal]}, "
            f"KV bytes {verdict[self.bytes_equal]}."
        )

    def _print_requests(self, console: Console) -> None:
        table = Table("request", "text", title=f"{self.workload.decoder.name}, greedy", title_justify="left")
        for prompt, (name, tokens) in zip(self.workload.scenario.prompts(), self.swapped.outputs.items(), strict=False):
            text = self.workload.decoder.decode(tokens).replace("\n", " ")
            table.add_row(name, f"[dim]{_escape(prompt)}[/dim]{_escape(text[:90])}")
        console.print(table)

    def _print_rates(self, console: Console) -> None:
        scenario = self.workload.scenario
        table = Table("", "tokens/s", "seconds", title="the same machine, one after the other", title_justify="left")
        rows = (
            (f"{scenario.requests} on {scenario.gpu_slots} slots, swapping", self.timed),
            (f"{scenario.gpu_slots} on {scenario.gpu_slots} slots, never swapping", self.ceiling),
            (f"{scenario.requests} on {scenario.gpu_slots}, everything stops for a swap", self.stopped),
            (f"{scenario.requests} on {scenario.gpu_slots}, KV dropped and recomputed", self.recomputed),
        )
        for label, result in rows:
            if result is not None:
                table.add_row(label, f"{result.tokens_per_s:.0f}", f"{result.wall_s:.1f}")
        console.print(table)


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile; 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _rate(result: RunResult | None) -> float | None:
    return None if result is None else result.tokens_per_s


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
