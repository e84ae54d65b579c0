"""The command `swapkv`."""

import json
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import anyio
import click
import torch
from rich.console import Console

from swapkv.demo.compare import compare, prove
from swapkv.demo.decoder import Decoder
from swapkv.demo.report import Report
from swapkv.demo.scenario import MEGABYTE, Scenario, Workload
from swapkv.demo.tiny_llama import TinyLlama
from swapkv.demo.watch import Watch
from swapkv.errors import SwapError
from swapkv.observe.chrome import write_trace
from swapkv.observe.live import LiveView
from swapkv.observe.recording import RecordingObserver
from swapkv.observe.records import Recorder
from swapkv.schedulers import VictimOrder

MISMATCH_EXIT = 1
BAD_INPUT_EXIT = 2


class DemoModel(Enum):
    """What generates."""

    TINY_LLAMA = "tiny-llama"
    GEMMA3_270M = "gemma3-270m"


@click.group()
@click.version_option(package_name="swapkv")
def main() -> None:
    """Preemption-aware KV cache swapping: more active requests than the GPU has KV memory for."""


@main.command(context_settings={"show_default": True})
@click.option("--gpu-slots", default=5, help="Requests whose KV fits the device.")
@click.option("--requests", default=8, help="Requests that are active.")
@click.option("--model", type=click.Choice([m.value for m in DemoModel]), default="tiny-llama", help="What generates.")
@click.option("--prompt", help="The prompt of every request.  [default: eight different ones]")
@click.option("--new-tokens", default=192, help="Tokens that each request generates.")
@click.option("--quantum", default=32, help="Tokens of a slice.")
@click.option("--page-size", default=16, help="Tokens a page.")
@click.option(
    "--slot-tokens", type=int, help="Tokens of KV that a slot holds.  [default: what the longest request needs]"
)
@click.option("--host-slots", type=int, help="Requests whose KV fits the host tier.  [default: all]")
@click.option("--link-mb-s", default=16.0, help=f"Bandwidth of the link each way, in MB/s ({MEGABYTE:,} bytes).")
@click.option("--restore-mb-s", type=float, help="Budget of all restores together, in MB/s.  [default: the link's]")
@click.option(
    "--victims",
    type=click.Choice([v.name.lower() for v in VictimOrder]),
    default="longest_slice",
    help="Who leaves first.",
)
@click.option("--seed", default=0, help="Seed of the built-in model's weights.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on standard output, and nothing else there."
)
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write a Chrome/Perfetto trace.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the timeline (.png or .svg).")
@click.option("--compare/--no-compare", default=True, help="Also run the three other ways.")
def demo(model: str, as_json: bool, trace: Path | None, plot: Path | None, compare: bool, **options: Any) -> None:  # noqa: FBT001
    """Generate for more requests than fit the device, and prove that nothing was lost.

    Runs on the host device: real streams, events and copies over host memory, with a limited link. Then runs the same
    requests with room for all and compares tokens and KV bytes; a mismatch exits with 1.
    """
    with _clear_errors():
        draw = _drawer(plot)
        options["victims"] = VictimOrder[options["victims"].upper()]
        scenario = Scenario(**options)
        torch.set_num_threads(1)
        workload = Workload.of(scenario, _decoder(DemoModel(model), scenario))
        observer = RecordingObserver()
        report = anyio.run(_run_demo, workload, observer, compare)
        if trace is not None:
            write_trace(observer.recorder, trace)
        if draw is not None and plot is not None:
            draw(observer.recorder, plot, scenario)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        report.print(Console())
    sys.exit(0 if report.equal else MISMATCH_EXIT)


async def _run_demo(workload: Workload, observer: RecordingObserver, with_comparison: bool) -> Report:  # noqa: FBT001
    watch = Watch(workload)
    with LiveView() as view:
        every = compare if with_comparison else prove
        return await every(
            workload, observer=observer, watcher=lambda pool, runner: view.update(watch.snapshot(pool, runner))
        )


def _decoder(model: DemoModel, scenario: Scenario) -> Decoder:
    page_size, chunk_tokens = scenario.page_size, scenario.chunk_tokens
    if model is DemoModel.TINY_LLAMA:
        return TinyLlama(seed=scenario.seed, page_size=page_size, chunk_tokens=chunk_tokens)
    from swapkv.demo.gemma import load_gemma

    return load_gemma(page_size=page_size, chunk_tokens=chunk_tokens)


def _drawer(plot: Path | None) -> Callable[[Recorder, Path, Scenario], None] | None:
    """The function that draws, loaded before the run so that a missing extra is known at once."""
    if plot is None:
        return None
    from swapkv.observe.timeline import draw_timeline

    def draw(recorder: Recorder, path: Path, scenario: Scenario) -> None:
        title = f"{scenario.requests} requests on {scenario.gpu_slots} GPU slots"
        draw_timeline(recorder, path, title=title)

    return draw


class _clear_errors:  # noqa: N801
    """Errors that the user can mend are printed as one line, without a traceback."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SwapError | ImportError):
            click.echo(f"swapkv: {error}", err=True)
            sys.exit(BAD_INPUT_EXIT)
