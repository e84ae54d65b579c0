"""The whole demo: the run under test, its twin, and timed runs of four ways on the same machine."""

from swapkv.demo.report import Report
from swapkv.demo.run import RunResult, Watcher, run
from swapkv.demo.scenario import Workload
from swapkv.observer import Observer
from swapkv.schedulers import Handover


async def compare(workload: Workload, *, observer: Observer | None = None, watcher: Watcher | None = None) -> Report:
    """Run everything, one after the other. `observer` and `watcher` see the run under test."""
    report = await prove(workload, observer=observer, watcher=watcher)
    slots, requests = workload.scenario.gpu_slots, workload.scenario.requests

    async def again(handover: Handover, count: int) -> RunResult:
        return await run(workload, slots=slots, requests=count, handover=handover)

    return Report(
        workload=workload,
        swapped=report.swapped,
        twin=report.twin,
        timed=await again(Handover.SWAP, requests),
        ceiling=await again(Handover.SWAP, slots),
        stopped=await again(Handover.STOP_THE_WORLD, requests),
        recomputed=await again(Handover.RECOMPUTE, requests),
    )


async def prove(workload: Workload, *, observer: Observer | None = None, watcher: Watcher | None = None) -> Report:
    """Run the scenario, then the same requests with room for all."""
    scenario = workload.scenario
    swapped = await run(
        workload, slots=scenario.gpu_slots, requests=scenario.requests, observer=observer, watcher=watcher
    )
    twin = await run(workload, slots=scenario.requests, requests=scenario.requests)
    return Report(workload=workload, swapped=swapped, twin=twin)
