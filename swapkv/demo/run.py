"""One run of the demo's workload, in one way of handing over."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import anyio
import attrs
import torch

from swapkv.demo.decoder import Row
from swapkv.demo.scenario import Workload
from swapkv.forward import Forward
from swapkv.ids import GroupId
from swapkv.observer import Observer
from swapkv.pool import Pool, open_pool
from swapkv.schedulers import BatchRow, Handover, Request, Runner
from swapkv.schedulers.tasks import plain_task_group
from swapkv.statistics import PoolStatistics
from swapkv.streams.host import HostDevice

Watcher = Callable[[Pool, Runner], None]
WATCH_INTERVAL_S = 0.1


@attrs.frozen(kw_only=True)
class RunResult:
    """What one run did.

    `outputs` and `kv_digests` (SHA-256 of the KV at a request's end) by request. `wall_s`: from the first request's
    arrival to the last one's end, the digests included. `idle_s`: of that, how long nothing could run because all
    waited for swaps. `restores_s`: how long each restore took, see `Request.restores_ns`.
    """

    outputs: Mapping[str, Sequence[int]]
    kv_digests: Mapping[str, str]
    wall_s: float
    idle_s: float
    steps: int
    preemptions: int
    recomputed_tokens: int
    restores_s: Sequence[float]
    statistics: PoolStatistics

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, prefill included."""
        return sum(len(tokens) for tokens in self.outputs.values()) / self.wall_s


async def run(
    workload: Workload,
    *,
    slots: int,
    requests: int,
    handover: Handover = Handover.SWAP,
    device: HostDevice | None = None,
    observer: Observer | None = None,
    watcher: Watcher | None = None,
) -> RunResult:
    """Run the first `requests` requests on device pages for `slots` of them.

    `device`: None for a host device with the scenario's link. `watcher` is called ten times a second while it runs, and
    once at the end.
    """
    device = HostDevice(link_bytes_per_s=workload.scenario.link_bytes_per_s) if device is None else device
    async with open_pool(
        workload.layout,
        num_pages=workload.pages(slots),
        host_bytes=workload.host_bytes(),
        device=device,
        config=workload.scenario.config(),
        observer=observer,
    ) as pool:
        digests: dict[str, str] = {}
        runner = Runner(
            pool,
            workload.scheduler(slots),
            partial(_prepare, workload, pool),
            handover=handover,
            on_finish=partial(_digest, pool, digests),
        )
        begin_s = time.monotonic()
        async with plain_task_group() as group:
            if watcher is not None:
                group.start_soon(_watch, watcher, pool, runner)
            await runner.run(_requests(workload, requests))
            wall_s = time.monotonic() - begin_s
            group.cancel_scope.cancel()
        if watcher is not None:
            watcher(pool, runner)
        return _result(pool, runner, digests, wall_s)


def _requests(workload: Workload, count: int) -> list[Request]:
    return [
        Request(name=f"request {n}", prompt=prompt, max_new_tokens=workload.scenario.new_tokens)
        for n, prompt in enumerate(workload.prompts[:count])
    ]


def _prepare(workload: Workload, pool: Pool, forward: Forward, rows: Sequence[BatchRow]) -> Callable[[], list[int]]:
    """A step of the decoder over the pages of the rows."""
    step = [Row(tokens=row.tokens, start=row.start, page_tables=forward.page_tables(row.name)) for row in rows]
    return lambda: workload.decoder.forward(step, pool.memory)


async def _watch(watcher: Watcher, pool: Pool, runner: Runner) -> None:
    while True:
        watcher(pool, runner)
        await anyio.sleep(WATCH_INTERVAL_S)


async def _digest(pool: Pool, digests: dict[str, str], request: Request) -> None:
    """Hash the KV of a request that has all its tokens, as its last forward would read it."""
    async with pool.forward({request.name: 0}) as forward:
        tables, tokens = forward.page_tables(request.name), forward.tokens(request.name)
        digests[request.name] = await forward.run(lambda: kv_digest(pool, tables, tokens))


def kv_digest(pool: Pool, page_tables: Sequence[torch.Tensor], tokens: int) -> str:
    """SHA-256 over the KV of `tokens` tokens, layer by layer, plane by plane, in the order of positions.

    Of windowed layers, the pages that hold the window.
    """
    digest = hashlib.sha256()
    layout = pool.layout
    for layer in range(layout.num_layers):
        group = GroupId(layout.group_of_layer[layer])
        first = layout.first_needed_page(group, tokens)
        rows = page_tables[group][first : layout.pages_for(tokens)]
        for plane in layout.planes[layer]:
            pages = pool.memory.plane(layer, plane.name)[rows]
            positions = pages.flatten(0, 1)[: tokens - first * layout.page_size]
            digest.update(positions.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _result(pool: Pool, runner: Runner, digests: Mapping[str, str], wall_s: float) -> RunResult:
    return RunResult(
        outputs={request.name: tuple(request.output) for request in runner.requests},
        kv_digests=digests,
        wall_s=wall_s,
        idle_s=runner.idle_ns / 1e9,
        steps=runner.steps,
        preemptions=sum(request.preemptions for request in runner.requests),
        recomputed_tokens=sum(request.recomputed_tokens for request in runner.requests),
        restores_s=tuple(restore / 1e9 for request in runner.requests for restore in request.restores_ns),
        statistics=pool.statistics(),
    )
