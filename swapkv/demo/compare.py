"""The whole demo: the run under test, its twin, and every way against the clock."""

from collections.abc import Callable

from swapkv.demo.report import Report
from swapkv.demo.run import RunResult, Watcher, run
from swapkv.demo.scenario import Workload
from swapkv.demo.ways import Way
from swapkv.observer import Observer

Announce = Callable[[str], None]


async def prove(
    workload: Workload,
    *,
    observer: Observer | None = None,
    watcher: Watcher | None = None,
    announce: Announce = lambda text: None,
) -> Report:
    """Run the scenario, seen by `observer` and `watcher`, then its twin: the same requests with room for all.

    `announce` is told of each run after the first, before it begins.
    """
    scenario = workload.scenario
    slots, requests = scenario.gpu_slots, scenario.requests
    swapped = await run(
        workload, slots=slots, requests=requests, mode=scenario.mode, observer=observer, watcher=watcher
    )
    announce(f"the twin: the same {requests} requests with room for all, to compare tokens and KV bytes")
    twin = await run(workload, slots=requests, requests=requests)
    return Report(workload=workload, swapped=swapped, twin=twin)


async def time_ways(workload: Workload, *, announce: Announce = lambda text: None) -> dict[Way, list[RunResult]]:
    """Run every way `Scenario.repeats` times, all alike: unobserved, and in turn, so that a slow spell hits them all."""
    scenario = workload.scenario
    ways = Way.timed(scenario.mode)
    results: dict[Way, list[RunResult]] = {way: [] for way in ways}
    total = scenario.repeats * len(ways)
    for number in range(total):
        way = ways[number % len(ways)]
        announce(f"timed run {number + 1} of {total}, {way.value}: {way.what(scenario)}")
        requests = way.requests(scenario)
        result = await run(workload, slots=scenario.gpu_slots, requests=requests, mode=way.mode, handover=way.handover)
        results[way].append(result)
    return results
