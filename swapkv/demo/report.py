"""What the demo found, for programs. `report_text` is for people."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

import attrs

from swapkv.demo.run import RunResult
from swapkv.demo.scenario import Workload
from swapkv.demo.ways import Way


@attrs.frozen(kw_only=True)
class Report:
    """The run under test, its twin with room for all, and the timed runs of every way (empty: not timed)."""

    workload: Workload
    swapped: RunResult
    twin: RunResult
    timed: Mapping[Way, Sequence[RunResult]] = attrs.field(factory=dict)

    @property
    def tokens_equal(self) -> bool:
        """Whether every request got the tokens that it gets with room for all, in every run that swapped or streamed."""
        return all(run.outputs == self.twin.outputs for run in self._swapping())

    @property
    def bytes_equal(self) -> bool:
        """Whether every request ended with the KV, byte for byte, that it has without swapping, in the same runs."""
        return all(run.kv_digests == self.twin.kv_digests for run in self._swapping())

    @property
    def equal(self) -> bool:
        return self.tokens_equal and self.bytes_equal

    def exact_requests(self, run: RunResult) -> int:
        """How many requests of a run ended with the twin's tokens and KV bytes."""
        return sum(not self.differences(run, name) for name in run.outputs)

    def differences(self, run: RunResult, name: str) -> list[str]:
        """What of one request differs from the twin."""
        found = []
        mine, other = run.outputs[name], self.twin.outputs[name]
        if mine != other:
            first = next((n for n, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]), len(other))
            found.append(f"tokens differ from number {first} on")
        if run.kv_digests[name] != self.twin.kv_digests[name]:
            found.append("KV bytes differ")
        return found

    def tokens_per_s(self, way: Way) -> float | None:
        """The median rate of a way; None: it was not timed."""
        return median(run.tokens_per_s for run in self.timed[way]) if self.timed.get(way) else None

    def share_of_ceiling(self, way: Way) -> float | None:
        """The rate of a way as a share of the ceiling's."""
        rate, ceiling = self.tokens_per_s(way), self.tokens_per_s(Way.CEILING)
        return rate / ceiling if rate and ceiling else None

    def as_json(self) -> dict[str, object]:
        """One object; `headline` holds the figures that the README quotes.

        Without timed runs `tokens_per_s` is that of the run under test, which was recorded meanwhile.
        """
        scenario, stats, swapped = self.workload.scenario, self.swapped.statistics, self.swapped
        return {
            "headline": {
                "tokens_equal": self.tokens_equal,
                "bytes_equal": self.bytes_equal,
                "recomputed_tokens": swapped.recomputed_tokens,
                "preemptions": swapped.preemptions,
                "tokens_per_s": self.tokens_per_s(Way.timed(scenario.mode)[0]) or swapped.tokens_per_s,
                "ceiling_tokens_per_s": self.tokens_per_s(Way.CEILING),
                "stop_the_world_tokens_per_s": self.tokens_per_s(Way.STOP_THE_WORLD),
                "recompute_tokens_per_s": self.tokens_per_s(Way.RECOMPUTING),
            },
            "model": self.workload.decoder.name,
            "scenario": attrs.asdict(scenario, value_serializer=lambda _i, _a, v: getattr(v, "value", v)),
            "device_pages": [counts.total for counts in stats.pages],
            "bytes_out": stats.out.bytes_copied,
            "bytes_in": stats.into.bytes_copied,
            "clean_bytes_kept": stats.counters.get("clean_bytes_kept", 0),
            "streamed_bytes": swapped.streamed_bytes,
            "restore_p50_s": quantile(swapped.restores_s, 0.5),
            "restore_p95_s": quantile(swapped.restores_s, 0.95),
            "wall_s": swapped.wall_s,
            "idle_s": swapped.idle_s,
            "counters": dict(stats.counters),
            "timed": {way.value: self._way_as_json(way) for way in self.timed},
            "requests": [
                {"name": name, "tokens": len(tokens), "text": self.workload.decoder.decode(tokens)}
                for name, tokens in swapped.outputs.items()
            ],
        }

    def _way_as_json(self, way: Way) -> dict[str, object]:
        runs = self.timed[way]
        return {
            "what": way.what(self.workload.scenario),
            "share_of_ceiling": self.share_of_ceiling(way),
            "tokens_per_s": [run.tokens_per_s for run in runs],
            "wall_s": [run.wall_s for run in runs],
            "idle_s": [run.idle_s for run in runs],
            "recomputed_tokens": [run.recomputed_tokens for run in runs],
            "exact_requests": [self.exact_requests(run) for run in runs],
            "requests": way.requests(self.workload.scenario),
        }

    def _swapping(self) -> list[RunResult]:
        """The runs that must not differ from the twin."""
        return [self.swapped, *(run for way, runs in self.timed.items() if way.exact for run in runs)]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank quantile; None for no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None
