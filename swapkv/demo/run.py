"""One run of the demo's workload, in one way of handing over."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import anyio
import attrs
import torch

from swapkv.attention.residency import LayerKV
from swapkv.demo.decoder import Row
from swapkv.demo.scenario import Mode, Workload
from swapkv.demo.streaming import StreamingModel, ring_bytes
from swapkv.forward import Forward
from swapkv.ids import GroupId
from swapkv.layout import KVLayout
from swapkv.observer import Observer
from swapkv.pool import Pool, open_pool
from swapkv.schedulers import BatchRow, Handover, Request, Runner, StreamRunner
from swapkv.schedulers.tasks import plain_task_group
from swapkv.statistics import PoolStatistics
from swapkv.streams.host import HostDevice

AnyRunner: TypeAlias = Runner | StreamRunner
Watcher: TypeAlias = Callable[[Pool, AnyRunner], None]
WATCH_INTERVAL_S = 0.1


@attrs.frozen(kw_only=True)
class RunResult:
    """What one run did.

    `outputs` and `kv_digests` (SHA-256 of the KV at a request's end) by request. `wall_s`: from the first request's
    arrival to the last one's end, the digests included. `idle_s`: of that, how long nothing could run because all
    waited for swaps. `restores_s`: how long each restore took, see `Request.restores_ns`.
    `streamed_bytes`: what crossed the link for attention alone, through a ring of `ring_bytes` (0: no streaming).
    """

    outputs: Mapping[str, Sequence[int]]
    kv_digests: Mapping[str, str]
    wall_s: float
    idle_s: float
    steps: int
    preemptions: int
    recomputed_tokens: int
    restores_s: Sequence[float]
    streamed_bytes: int
    ring_bytes: int
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
    mode: Mode = Mode.SWAP,
    handover: Handover = Handover.SWAP,
    device: HostDevice | None = None,
    observer: Observer | None = None,
    watcher: Watcher | None = None,
) -> RunResult:
    """Run the first `requests` requests on device memory for `slots` of them; in mode STREAM, the ring is part of that.

    `device`: None for a host device with the scenario's link. `watcher` is called ten times a second while it runs, and
    once at the end.
    """
    device = HostDevice(link_bytes_per_s=workload.scenario.link_bytes_per_s) if device is None else device
    ring = ring_bytes(workload.layout) if mode is Mode.STREAM else 0
    async with open_pool(
        workload.layout,
        num_pages=workload.pages(slots, less_bytes=ring),
        host_bytes=workload.host_bytes(),
        device=device,
        config=workload.scenario.config(),
        observer=observer,
    ) as pool:
        digests: dict[str, str] = {}
        model, on_finish = partial(_prepare, workload, pool), partial(_digest, pool, digests)
        streaming = StreamingModel(workload.decoder, pool, device) if mode is Mode.STREAM else None
        runner: AnyRunner
        if streaming is not None:
            runner = StreamRunner(pool, streaming, on_finish)
        else:
            runner = Runner(pool, workload.scheduler(slots), model, handover=handover, on_finish=on_finish)
        begin_s = time.monotonic()
        async with plain_task_group() as group:
            if watcher is not None:
                group.start_soon(_watch, watcher, pool, runner)
            await runner.run(_requests(workload, requests))
            wall_s = time.monotonic() - begin_s
            group.cancel_scope.cancel()
        if watcher is not None:
            watcher(pool, runner)
        streamed = 0 if streaming is None else streaming.streamer.counts.bytes_streamed
        return _result(pool, runner, digests, wall_s, streamed_bytes=streamed, ring_bytes=ring)


def _requests(workload: Workload, count: int) -> list[Request]:
    return [
        Request(name=f"request {n}", prompt=prompt, max_new_tokens=workload.scenario.new_tokens)
        for n, prompt in enumerate(workload.prompts[:count])
    ]


def _prepare(workload: Workload, pool: Pool, forward: Forward, rows: Sequence[BatchRow]) -> Callable[[], list[int]]:
    """A step of the decoder over the pages of the rows."""
    step = [Row(tokens=row.tokens, start=row.start, page_tables=forward.page_tables(row.name)) for row in rows]
    return lambda: workload.decoder.forward(step, pool.memory)


async def _watch(watcher: Watcher, pool: Pool, runner: AnyRunner) -> None:
    while True:
        watcher(pool, runner)
        await anyio.sleep(WATCH_INTERVAL_S)


async def _digest(pool: Pool, digests: dict[str, str], request: Request) -> None:
    """Hash the KV of a request that has all its tokens, as its last forward would read it."""
    async with pool.forward({request.name: 0}) as forward:
        tokens, layers = forward.tokens(request.name), range(pool.layout.num_layers)
        kvs = [forward.layer_kv(request.name, layer, _planes(pool, layer)) for layer in layers]
        digests[request.name] = await forward.run(lambda: kv_digest(pool.layout, kvs, tokens))


def _planes(pool: Pool, layer: int) -> list[torch.Tensor]:
    return [pool.memory.plane(layer, plane.name) for plane in pool.layout.planes[layer]]


def kv_digest(layout: KVLayout, kvs: Sequence[LayerKV], tokens: int) -> str:
    """SHA-256 over the KV of `tokens` tokens, wherever it lies, layer by layer, plane by plane, in order of positions.

    Of windowed layers, the pages that hold the window.
    """
    digest = hashlib.sha256()
    for layer, kv in enumerate(kvs):
        first = layout.first_needed_page(GroupId(layout.group_of_layer[layer]), tokens)
        rows = kv.page_table[first : layout.pages_for(tokens)]
        for number, plane in enumerate(kv.planes):
            pages = plane[rows.clamp(min=0)]
            for run in kv.runs:
                pages[run.first - first : run.stop - first] = (
                    run.planes[number].view(plane.dtype).view(-1, *plane.shape[1:])
                )
            positions = pages.flatten(0, 1)[: tokens - first * layout.page_size]
            digest.update(positions.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _result(
    pool: Pool,
    runner: AnyRunner,
    digests: Mapping[str, str],
    wall_s: float,
    *,
    streamed_bytes: int,
    ring_bytes: int,
) -> RunResult:
    return RunResult(
        outputs={request.name: tuple(request.output) for request in runner.requests},
        kv_digests=digests,
        wall_s=wall_s,
        idle_s=runner.idle_ns / 1e9,
        steps=runner.steps,
        preemptions=sum(request.preemptions for request in runner.requests),
        recomputed_tokens=sum(request.recomputed_tokens for request in runner.requests),
        restores_s=tuple(restore / 1e9 for request in runner.requests for restore in request.restores_ns),
        streamed_bytes=streamed_bytes,
        ring_bytes=ring_bytes,
        statistics=pool.statistics(),
    )
