"""The command `swapkv`."""

import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import attrs
import click
import torch
from rich.console import Console

from swapkv.demo.compare import prove, time_ways
from swapkv.demo.report import Report
from swapkv.demo.report_text import print_report
from swapkv.demo.scenario import MEGABYTE, Mode, Scenario, Workload
from swapkv.demo.tiny_llama import TinyLlama
from swapkv.demo.watch import Watch
from swapkv.doctor import Subject, examine, lacking
from swapkv.errors import ProtocolError, SwapError
from swapkv.observe.chrome import write_trace
from swapkv.observe.live import LiveView
from swapkv.observe.recording import RecordingObserver
from swapkv.observe.records import Recorder
from swapkv.schedulers import VictimOrder

MISMATCH_EXIT = 1
BAD_INPUT_EXIT = 2
INTERRUPTED_EXIT = 130
NOISE = "random weights: noise that hangs on every byte of KV"


class DemoModel(Enum):
    """What generates."""

    TINY_LLAMA = "tiny-llama"
    GEMMA3_270M = "gemma3-270m"


@click.group()
@click.version_option(package_name="swapkv")
def main() -> None:
    """Preemption-aware KV cache swapping: more active requests than the GPU has KV memory for."""


@main.command(context_settings={"show_default": True})
@click.option(
    "--mode",
    type=click.Choice([m.value for m in Mode]),
    default="swap",
    help="swap: requests take turns. stream: all run in every step; what does not fit is read in host memory.",
)
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
@click.option("--trace", type=click.Path(path_type=Path), help="Write a Chrome/Perfetto trace to this file.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the timeline to this file (.png or .svg).")
@click.option("--compare/--no-compare", default=True, help="Also time other ways to serve the requests.")
@click.option("--repeats", default=2, help="How often each of them is timed.")
def demo(model: str, as_json: bool, trace: Path | None, plot: Path | None, compare: bool, **options: Any) -> None:  # noqa: FBT001
    """Generate for more requests than fit the device, and prove that nothing was lost.

    Runs on the host device: real streams, events and copies over host memory, with a limited link. Then runs the same
    requests with room for all and compares tokens and KV bytes; a mismatch exits with 1, bad input with 2.
    """
    with _clear_errors():
        named = {"victims": VictimOrder[options["victims"].upper()], "mode": Mode(options["mode"])}
        scenario = Scenario(**options | named)
        outputs = [*_trace_output(trace), *_plot_output(plot, scenario)]
        torch.set_num_threads(1)
        workload = _workload(DemoModel(model), scenario)
        observer = RecordingObserver()
        with LiveView() as view:
            report = anyio.run(_prove, workload, observer, view)
            if compare:
                timed = anyio.run(partial(time_ways, announce=view.note), workload)
                report = attrs.evolve(report, timed=timed)
        _print(report, json_only=as_json)
        for write in outputs:
            write(observer.recorder)
    sys.exit(0 if report.equal else MISMATCH_EXIT)


@main.command(context_settings={"show_default": True})
@click.option(
    "--require",
    "required",
    type=click.Choice([s.value for s in Subject]),
    multiple=True,
    help="Exit with 1 if this is missing; may be given several times.",
)
@click.option("--mooncake", metavar="HOST:PORT", help="Also try to reach a Mooncake master.")
@click.option(
    "--gds",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Also write from the GPU to a file in this folder and read it back.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def doctor(required: tuple[str, ...], mooncake: str | None, gds: Path | None, as_json: bool) -> None:  # noqa: FBT001
    """What this machine offers, what is missing, and what helps.

    Exits with 1 if something is missing that was asked for: by --require, a Mooncake master by --mooncake, or
    GPUDirect Storage to a folder's disk by --gds.
    """
    with _clear_errors():
        findings = examine(mooncake=mooncake, gds=gds)
    wanted = [Subject(name) for name in required]
    wanted += [subject for subject, asked in ((Subject.MOONCAKE, mooncake), (Subject.GDS, gds)) if asked]
    missing = lacking(findings, wanted)
    if as_json:
        found = [attrs.asdict(f, value_serializer=lambda _i, _a, v: getattr(v, "value", v)) for f in findings]
        click.echo(json.dumps({"findings": found, "lacking": [f.words for f in missing]}, indent=2))
    else:
        for finding in findings:
            mark = "--" if finding.missing else "ok"
            click.echo(f"{mark}  {finding.subject.value:<9} {finding.words}")
    sys.exit(MISMATCH_EXIT if missing else 0)


@main.group()
def bench() -> None:
    """Benchmarks of the parts. Ways are timed in turn, within one run: read their ratios."""


@bench.command("attention", context_settings={"show_default": True})
@click.option("--context", default=8192, help="Tokens of the sequence.")
@click.option("--heads", default=32, help="Query heads.")
@click.option("--kv-heads", default=8, help="KV heads.")
@click.option("--head-dim", default=128, help="Numbers of a head.")
@click.option("--layers", default=4, help="Layers.")
@click.option("--page-size", default=16, help="Tokens a page.")
@click.option("--split-tokens", default=256, help="Tokens of a split.")
@click.option("--unit-splits", default=4, help="Splits of a staging buffer.")
@click.option("--fraction", default=0.75, help="Share of the pages that lies in host memory.")
@click.option("--depth", default=4, help="Staging buffers.")
@click.option("--link-mb-s", type=float, help="Bandwidth of the link, MB/s.  [default: as long as computing takes]")
@click.option("--steps", default=4, help="Decode steps in a row that a timing covers.")
@click.option("--repeats", default=5, help="Timings of each way; the median counts.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on standard output, and nothing else there."
)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the ways to this file (.png or .svg).")
def bench_attention(as_json: bool, plot: Path | None, **options: Any) -> None:  # noqa: FBT001
    """Decode attention over KV that is partly in host memory, on the host device.

    Exits with 1 if any way gives other bits than KV that is all on the device, with 2 for bad input.
    """
    from swapkv.bench.attention import Case, measure
    from swapkv.bench.attention_report import draw_measured, print_measured

    with _clear_errors():
        case = Case(**options)
        if plot is not None:
            _require_writable("--plot", plot)
        measured = measure(case, note=lambda text: click.echo(f"swapkv: {text}", err=True))
        if as_json:
            click.echo(json.dumps(measured.as_json(), indent=2, allow_nan=False))
        else:
            print_measured(measured, Console())
        if plot is not None:
            draw_measured(measured, plot)
            click.echo(f"swapkv: wrote {plot}", err=True)
    sys.exit(0 if all(measured.bitwise_equal.values()) else MISMATCH_EXIT)


async def _prove(workload: Workload, observer: RecordingObserver, view: LiveView) -> Report:
    watch = Watch(workload)
    return await prove(
        workload,
        observer=observer,
        watcher=lambda pool, runner: view.update(watch.snapshot(pool, runner)),
        announce=view.note,
    )


def _print(report: Report, *, json_only: bool) -> None:
    if json_only:
        click.echo(json.dumps(report.as_json(), indent=2, allow_nan=False))
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    print_report(report, Console())


def _workload(model: DemoModel, scenario: Scenario) -> Workload:
    page_size, chunk_tokens = scenario.page_size, scenario.chunk_tokens
    if model is DemoModel.TINY_LLAMA:
        decoder = TinyLlama(seed=scenario.seed, page_size=page_size, chunk_tokens=chunk_tokens)
        return Workload(scenario=scenario, decoder=decoder, text_note=NOISE)
    if scenario.mode is Mode.STREAM:
        raise ProtocolError(f"--mode stream runs the built-in model only, not {model.value}: leave --model out")
    from swapkv.demo.gemma import load_gemma

    click.echo(f"swapkv: loading {model.value}; the first time, its weights are converted for a minute", err=True)
    return Workload(scenario=scenario, decoder=load_gemma(page_size=page_size, chunk_tokens=chunk_tokens))


def _trace_output(path: Path | None) -> Iterator[Callable[[Recorder], None]]:
    """What writes the trace; a path that cannot be written is found out before the run."""
    if path is None:
        return
    _require_writable("--trace", path)

    def write(recorder: Recorder) -> None:
        write_trace(recorder, path)
        click.echo(f"swapkv: wrote {path}, to be opened in https://ui.perfetto.dev", err=True)

    yield write


def _plot_output(path: Path | None, scenario: Scenario) -> Iterator[Callable[[Recorder], None]]:
    """What draws the timeline; its extra is loaded before the run, so that a missing one is known at once."""
    if path is None:
        return
    from swapkv.observe.timeline import draw_timeline, require_format

    require_format(path)
    _require_writable("--plot", path)

    def write(recorder: Recorder) -> None:
        draw_timeline(recorder, path, title=f"{scenario.requests} requests on {scenario.gpu_slots} GPU slots")
        click.echo(f"swapkv: wrote {path}", err=True)

    yield write


def _require_writable(option: str, path: Path) -> None:
    if path.is_dir():
        raise ProtocolError(f"{option} {path} is a directory: name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        why = error.strerror or error
        raise ProtocolError(
            f"{option} {path} cannot be written ({why}): name a file in a writable directory"
        ) from error


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Errors that the user can mend are printed as one line, without a traceback."""
    try:
        yield
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        click.echo("swapkv: interrupted", err=True)
        sys.exit(INTERRUPTED_EXIT)
    except (SwapError, ImportError, OSError) as error:
        click.echo(f"swapkv: {error}", err=True)
        sys.exit(BAD_INPUT_EXIT)
