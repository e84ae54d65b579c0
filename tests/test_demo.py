"""The demo end to end: what was swapped equals its twin, and the comparison can fail."""

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import attrs
import pytest
import torch
from rich.console import Console

from swapkv.demo.compare import prove, time_ways
from swapkv.demo.report import Report, quantile
from swapkv.demo.report_text import print_report
from swapkv.demo.run import RunResult, run
from swapkv.demo.scenario import Mode, Scenario, Workload
from swapkv.demo.tiny_llama import TinyLlama
from swapkv.demo.watch import Watch
from swapkv.demo.ways import Way
from swapkv.errors import ProtocolError
from swapkv.observe.snapshot import RunSnapshot
from swapkv.pool import Pool
from swapkv.schedulers import Handover, Runner, VictimOrder
from swapkv.streams.host import HostDevice, Operation, Work

BACKENDS = ("asyncio", "trio")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are compared, and the number of threads is part of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def workload(*, windows: Sequence[int | None] | None = None, **options: Any) -> Workload:
    """Four requests on two slots, of a very small model."""
    small = {"gpu_slots": 2, "requests": 4, "new_tokens": 20, "quantum": 5, "link_mb_s": 100.0, "repeats": 1}
    scenario = Scenario(**small | options)
    decoder = TinyLlama(
        seed=scenario.seed,
        num_layers=2,
        hidden=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        page_size=scenario.page_size,
        chunk_tokens=scenario.chunk_tokens,
        windows=windows,
    )
    return Workload(scenario=scenario, decoder=decoder, text_note="noise")


def proven(work: Workload, backend: str = "asyncio") -> Report:
    return anyio.run(prove, work, backend=backend)


def run_on(work: Workload, device: HostDevice | None = None, slots: int = 2) -> RunResult:
    async def main() -> RunResult:
        return await run(work, slots=slots, requests=work.scenario.requests, device=device)

    return anyio.run(main)


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("windows", [None, [8, None]])
def test_demo_swapped_run_equals_its_twin(page_size: int, windows: list[int | None] | None) -> None:
    report = proven(workload(page_size=page_size, windows=windows))
    assert report.tokens_equal
    assert report.bytes_equal
    assert report.swapped.recomputed_tokens == 0
    assert report.swapped.preemptions >= 4
    assert report.twin.preemptions == 0
    assert len(report.swapped.restores_s) == report.swapped.preemptions
    assert report.swapped.statistics.out.bytes_copied > 0
    assert {len(tokens) for tokens in report.swapped.outputs.values()} == {20}


@pytest.mark.parametrize(
    "options",
    [
        {"quantum": 1},
        {"new_tokens": 1},
        {"gpu_slots": 1},
        {"gpu_slots": 4},
        {"prompt": ""},
        {"slot_tokens": 200},
        {"restore_mb_s": 5.0},
        {"victims": VictimOrder.SCORE},
    ],
)
def test_demo_swapped_run_equals_its_twin_with(options: dict[str, Any]) -> None:
    report = proven(workload(**options))
    assert report.equal
    assert report.swapped.recomputed_tokens == 0


@pytest.mark.parametrize("host_slots", [0, 1])
def test_demo_full_host_tier_replays_bit_for_bit(host_slots: int) -> None:
    report = proven(workload(host_slots=host_slots))
    assert report.equal
    assert report.swapped.recomputed_tokens > 0


def test_demo_same_seed_gives_the_same_outputs_on_every_backend() -> None:
    reports = [proven(workload(), backend) for backend in (*BACKENDS, *BACKENDS)]
    assert all(report.equal for report in reports)
    assert all(report.swapped.outputs == reports[0].swapped.outputs for report in reports)
    assert all(report.swapped.kv_digests == reports[0].swapped.kv_digests for report in reports)


def test_demo_other_seed_gives_other_outputs() -> None:
    one, other = (run_on(workload(seed=seed)) for seed in (0, 1))
    assert all(one.outputs[name] != other.outputs[name] for name in one.outputs)
    assert all(one.kv_digests[name] != other.kv_digests[name] for name in one.kv_digests)


class Corrupting(HostDevice):
    """A device that flips bits of one byte of KV after a restore has copied and verified it."""

    def __init__(self, byte: int, bits: int) -> None:
        super().__init__()
        self._byte, self._bits = byte, bits

    def execute(self, operation: Operation) -> None:
        super().execute(operation)
        if operation.work is Work.SCATTER:
            block = operation.blocks[0]
            block.regions[0].pages[block.pages[0], self._byte] ^= self._bits


def test_demo_one_flipped_bit_makes_the_bytes_unequal() -> None:
    work = workload()
    report = Report(workload=work, swapped=run_on(work, Corrupting(byte=0, bits=1)), twin=run_on(work, slots=4))
    assert not report.bytes_equal
    assert not report.equal
    assert "KV bytes DIFFERENT" in text_of(report)
    assert "NOT EXACT" in text_of(report)


def test_demo_wrong_kv_makes_the_tokens_unequal() -> None:
    work = workload()
    report = Report(workload=work, swapped=run_on(work, Corrupting(byte=3, bits=0x41)), twin=run_on(work, slots=4))
    assert not report.tokens_equal
    assert "tokens DIFFERENT" in text_of(report)
    assert "tokens differ from number" in text_of(report)
    assert report.exact_requests(report.swapped) < 4


def test_demo_wrong_kv_in_a_timed_run_counts() -> None:
    work = workload()
    good, bad = run_on(work), run_on(work, Corrupting(byte=0, bits=1))
    twin = run_on(work, slots=4)
    timed = {way: [good] for way in Way.timed(Mode.SWAP)}
    assert Report(workload=work, swapped=good, twin=twin, timed=timed).equal
    assert Report(workload=work, swapped=good, twin=twin, timed=timed | {Way.RECOMPUTING: [bad]}).equal
    for way in (Way.SWAPPING, Way.STOP_THE_WORLD):
        assert not Report(workload=work, swapped=good, twin=twin, timed=timed | {way: [good, bad]}).equal


@pytest.fixture(scope="module")
def compared() -> tuple[Report, list[str]]:
    """A whole comparison, and what it announced."""
    torch.set_num_threads(1)
    work, announced = workload(repeats=2), list[str]()

    async def main() -> Report:
        report = await prove(work, announce=announced.append)
        timed = await time_ways(work, announce=announced.append)
        return Report(workload=work, swapped=report.swapped, twin=report.twin, timed=timed)

    return anyio.run(main), announced


def test_compare_runs_every_way_in_turn(compared: tuple[Report, list[str]]) -> None:
    report, announced = compared
    assert report.equal
    assert {way: len(runs) for way, runs in report.timed.items()} == dict.fromkeys(Way.timed(Mode.SWAP), 2)
    assert announced[0].startswith("the twin")
    ways = [text.split(":")[0] for text in announced[1:]]
    assert ways == [f"timed run {n + 1} of 8, {Way.timed(Mode.SWAP)[n % 4].value}" for n in range(8)]


def test_compare_ways_differ_in_what_they_should(compared: tuple[Report, list[str]]) -> None:
    timed = compared[0].timed
    for result in (*timed[Way.SWAPPING], *timed[Way.STOP_THE_WORLD]):
        assert (len(result.outputs), result.recomputed_tokens) == (4, 0)
        assert result.preemptions > 0
        assert result.statistics.into.bytes_copied > 0
    for result in timed[Way.STOP_THE_WORLD]:
        assert result.idle_s > 0
    for result in timed[Way.RECOMPUTING]:
        assert result.recomputed_tokens > 0
        assert result.statistics.out.bytes_copied == result.statistics.into.bytes_copied == 0
    for result in timed[Way.CEILING]:
        assert (len(result.outputs), result.preemptions, result.idle_s) == (2, 0, 0.0)


def test_report_json_has_the_headline_and_every_run(compared: tuple[Report, list[str]]) -> None:
    report = json.loads(json.dumps(compared[0].as_json(), allow_nan=False))
    headline = report["headline"]
    assert list(headline) == [
        "tokens_equal",
        "bytes_equal",
        "recomputed_tokens",
        "preemptions",
        "tokens_per_s",
        "ceiling_tokens_per_s",
        "stop_the_world_tokens_per_s",
        "recompute_tokens_per_s",
    ]
    assert (headline["tokens_equal"], headline["bytes_equal"], headline["recomputed_tokens"]) == (True, True, 0)
    assert all(value > 0 for name, value in headline.items() if name.endswith("_per_s"))
    assert set(report["timed"]) == {way.value for way in Way.timed(Mode.SWAP)}
    assert report["timed"]["ceiling"]["share_of_ceiling"] == 1.0
    assert report["timed"]["swapping"]["exact_requests"] == [4, 4]
    assert [request["tokens"] for request in report["requests"]] == [20] * 4


def test_report_json_without_timed_runs_has_no_rates_to_compare() -> None:
    report = proven(workload())
    headline: Any = report.as_json()["headline"]
    assert headline["ceiling_tokens_per_s"] is None
    assert headline["tokens_per_s"] == report.swapped.tokens_per_s
    assert report.share_of_ceiling(Way.SWAPPING) is None


def text_of(report: Report, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_report_text_says_what_each_run_is_and_ends_with_the_verdict(
    compared: tuple[Report, list[str]], width: int
) -> None:
    text = text_of(compared[0], width)
    assert all(len(line) <= width for line in text.splitlines())
    words = " ".join(text.split())
    assert "tiny-llama-0 wrote noise" in words
    for way in Way.timed(Mode.SWAP):
        assert f"{way.value} " in words
    assert "only 2 requests on 2 slots" in words
    assert text.splitlines()[-1] == "EXACT: tokens equal, KV bytes equal, 0 tokens recomputed"


def test_report_text_doubts_rates_that_contradict_each_other(compared: tuple[Report, list[str]]) -> None:
    steady = {
        way: [attrs.evolve(run, wall_s=len(run.outputs) / 4) for run in runs] for way, runs in compared[0].timed.items()
    }
    fast, slow = (attrs.evolve(steady[Way.SWAPPING][0], wall_s=seconds) for seconds in (0.5, 1.0))
    doubts = {
        "something else was using this machine": {Way.RECOMPUTING: [fast, slow]},
        "beats its ceiling": {Way.SWAPPING: [fast, fast]},
    }
    assert not any(doubt in text_of(attrs.evolve(compared[0], timed=steady)) for doubt in doubts)
    for doubt, timed in doubts.items():
        assert doubt in text_of(attrs.evolve(compared[0], timed=steady | timed))


class Readable(TinyLlama):
    """A model of which somebody would read what it writes."""

    def decode(self, tokens: Sequence[int]) -> str:
        return f" and then\n\n{'word ' * 100}"


def test_report_text_of_a_model_that_can_be_read_is_wrapped_below_its_prompt() -> None:
    scenario = Scenario(gpu_slots=1, requests=2, new_tokens=3, prompt="It [bold]began\\ so")
    decoder = Readable(num_layers=1, hidden=16, num_heads=2, num_kv_heads=1, head_dim=8, chunk_tokens=32)
    report = proven(Workload(scenario=scenario, decoder=decoder))
    lines = [line.rstrip() for line in text_of(report, 80).splitlines()]
    assert lines[2] == "  request 0  It [bold]began\\ so"
    assert lines[3].startswith("             and then word word")
    assert lines[7].endswith("…")
    assert lines[9] == "  request 1  It [bold]began\\ so"


def test_report_text_without_preemptions_says_how_to_get_some() -> None:
    words = " ".join(text_of(proven(workload(quantum=20))).split())
    assert "Nobody was preempted: give more --requests than --gpu-slots, and a --quantum below --new-tokens." in words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_slots": 0}, r"--gpu-slots 0 must be .* from 1 .*: without a slot nothing can run"),
        ({"gpu_slots": 5}, "--gpu-slots 5 are more than --requests 4: take at most 4 slots, or more requests"),
        ({"new_tokens": -3}, "--new-tokens -3 must be"),
        ({"link_mb_s": 0.0}, "--link-mb-s 0.0 must be .*: a link without bandwidth moves nothing"),
        ({"link_mb_s": float("nan")}, "--link-mb-s nan must be"),
        ({"link_mb_s": float("inf")}, "--link-mb-s inf must be"),
        ({"restore_mb_s": -1.0}, "--restore-mb-s -1.0 must be"),
        ({"host_slots": -1}, "--host-slots -1 must be"),
        ({"seed": 1 << 70}, "--seed 1180591620717411303424 must be"),
        ({"repeats": 0}, "--repeats 0 must be .*: to time nothing, say --no-compare"),
        ({"slot_tokens": 5}, r"--slot-tokens 5 is too small: a prompt of 49 tokens and 20 new ones take 68"),
    ],
)
def test_scenario_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        workload(**options)


def test_watch_sees_every_request_to_its_end() -> None:
    work, pictures = workload(), list[RunSnapshot]()
    watch = Watch(work)

    def look(pool: Pool, runner: Runner) -> None:
        pictures.append(watch.snapshot(pool, runner))

    async def main() -> None:
        await run(work, slots=2, requests=4, handover=Handover.SWAP, watcher=look)

    anyio.run(main)
    assert pictures[0].title == "4 requests on 2 GPU slots"
    assert [row.state for row in pictures[-1].rows] == ["FINISHED"] * 4
    assert all(row.tokens == row.target_tokens == 20 for row in pictures[-1].rows)
    assert all(picture.pages_owned + picture.pages_free + picture.pages_fenced == 10 for picture in pictures)
    assert all(row.waiting_s >= 0 for picture in pictures for row in picture.rows)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3.0], 0.95, 3.0), ([4.0, 1.0], 0.5, 1.0), ([1.0, 2.0, 3.0], 0.5, 2.0), ([1.0, 2.0], 0.95, 2.0)],
)
def test_quantile_is_the_nearest_rank(values: list[float], share: float, expected: float | None) -> None:
    assert quantile(values, share) == expected
