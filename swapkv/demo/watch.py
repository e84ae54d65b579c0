"""A run as the live view shows it."""

import time
from collections import deque

from swapkv.demo.run import AnyRunner
from swapkv.demo.scenario import Workload
from swapkv.observe.snapshot import RequestRow, RunSnapshot
from swapkv.pool import Pool
from swapkv.schedulers import Phase, Request

RATE_WINDOW_S = 1.0


class Watch:
    """Makes snapshots; rates are over the last second."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._begin_s = time.monotonic()
        self._history: deque[tuple[float, int, int]] = deque()

    def snapshot(self, pool: Pool, runner: AnyRunner) -> RunSnapshot:
        """The run as it is now."""
        stats = pool.statistics()
        now_s = time.monotonic()
        coming = stats.into.bytes_copied + stats.counters.get("streamed_bytes", 0)
        out, into = self._rates(now_s, stats.out.bytes_copied, coming)
        scenario = self._workload.scenario
        return RunSnapshot(
            title=f"{scenario.requests} requests on {scenario.gpu_slots} GPU slots",
            elapsed_s=now_s - self._begin_s,
            rows=tuple(_row(pool, request) for request in runner.requests),
            pages_free=sum(counts.free for counts in stats.pages),
            pages_owned=sum(counts.owned for counts in stats.pages),
            pages_fenced=sum(counts.fenced for counts in stats.pages),
            pages_quarantined=sum(counts.quarantined for counts in stats.pages),
            out_bytes_per_s=out,
            in_bytes_per_s=into,
            link_bytes_per_s=scenario.link_bytes_per_s,
            restore_bucket_fill=stats.into.bucket_fill,
            host_bytes_used=stats.host_bytes_used,
            host_bytes_total=stats.host_bytes_total,
        )

    def _rates(self, now_s: float, out: int, into: int) -> tuple[float, float]:
        self._history.append((now_s, out, into))
        while now_s - self._history[0][0] > RATE_WINDOW_S and len(self._history) > 2:
            self._history.popleft()
        then_s, then_out, then_into = self._history[0]
        elapsed_s = max(now_s - then_s, 1e-9)
        return (out - then_out) / elapsed_s, (into - then_into) / elapsed_s


def _row(pool: Pool, request: Request) -> RequestRow:
    done = request.phase is Phase.DONE
    waiting_s = (time.monotonic_ns() - request.waiting_since_ns) / 1e9 if request.waiting_since_ns else 0.0
    return RequestRow(
        name=request.name,
        state="FINISHED" if done else pool.state(request.name).value,
        chunks=() if done else tuple(state.value for state in pool.chunk_states(request.name)),
        tokens=len(request.output),
        target_tokens=request.max_new_tokens,
        preemptions=request.preemptions,
        waiting_s=0.0 if done else waiting_s,
    )
