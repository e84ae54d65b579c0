"""`swapkv demo --mode stream`: all requests in every step on memory for some, with the tokens and bytes of a twin."""

import json
from collections.abc import Iterator

import anyio
import pytest
import torch
from click.testing import CliRunner

from swapkv.cli import main
from swapkv.demo.compare import prove, time_ways
from swapkv.demo.scenario import Mode, Scenario, Workload
from swapkv.demo.streaming import ring_bytes
from swapkv.demo.tiny_llama import TinyLlama
from swapkv.demo.ways import Way
from swapkv.errors import PagesExhausted, ProtocolError
from swapkv.schedulers import StreamRunner
from swapkv.stepped import open_stepped_pool
from swapkv.transfers import Transfers


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def workload(**options: int) -> Workload:
    """Five requests, more than fit; the ring of one split of 256 tokens twice is part of the memory."""
    scenario = Scenario(
        mode=Mode.STREAM,
        **{"gpu_slots": 4, "requests": 5, "new_tokens": 260, "repeats": 1, "link_mb_s": 100, **options},
    )
    decoder = TinyLlama(
        num_layers=2,
        hidden=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        page_size=scenario.page_size,
        chunk_tokens=scenario.chunk_tokens,
    )
    return Workload(scenario=scenario, decoder=decoder, text_note="noise")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_streamed_run_equals_its_twin_with_all_requests_in_every_step(backend: str) -> None:
    work = workload()
    report = anyio.run(prove, work, backend=backend)
    assert report.equal
    run = report.swapped
    assert run.steps == 260, "each step gave every request a token"
    assert run.preemptions == run.recomputed_tokens == 0
    assert run.streamed_bytes > 0
    assert run.statistics.counters["spills"] > 0
    device_bytes = sum(counts.total for counts in run.statistics.pages) * work.layout.page_bytes(0)  # type: ignore[arg-type]
    assert device_bytes + ring_bytes(work.layout) <= sum(work.pages(4)) * work.layout.page_bytes(0)  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [1, 64])
def test_streamed_run_equals_its_twin_at_other_page_sizes(page_size: int) -> None:
    assert anyio.run(prove, workload(page_size=page_size)).equal


def test_wrong_bytes_in_host_memory_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Transfers.host_pages
    monkeypatch.setattr(Transfers, "host_pages", lambda *args: [plane.clone().zero_() for plane in read(*args)])
    report = anyio.run(prove, workload())
    assert not report.tokens_equal
    assert not report.bytes_equal


def test_timed_ways_of_the_mode_are_exact() -> None:
    timed = anyio.run(time_ways, workload(new_tokens=150, gpu_slots=3))
    assert list(timed) == [Way.STREAMING, Way.SWAPPING, Way.CEILING]
    assert timed[Way.STREAMING][0].outputs == timed[Way.SWAPPING][0].outputs


def test_too_little_memory_even_for_the_begun_chunks_is_refused_with_the_remedy() -> None:
    with pytest.raises(PagesExhausted, match="run fewer at once"):
        anyio.run(prove, workload(gpu_slots=2, requests=24, slot_tokens=400))


def test_layout_with_windows_is_refused_with_the_remedy() -> None:
    layout = TinyLlama(num_layers=2, windows=[8, None]).layout
    with (
        open_stepped_pool(layout, num_pages=64, host_bytes=0) as pool,
        pytest.raises(ProtocolError, match="use Runner"),
    ):
        StreamRunner(pool, lambda forward, rows: list)  # type: ignore[arg-type]


def test_command_line_streams() -> None:
    arguments = ["demo", "--mode", "stream", "--no-compare", "--json", "--new-tokens", "120", "--link-mb-s", "200"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["headline"]["tokens_equal"]
    assert report["headline"]["bytes_equal"]
    assert report["streamed_bytes"] > 0


def test_other_models_are_refused_before_they_are_loaded() -> None:
    result = CliRunner().invoke(main, ["demo", "--mode", "stream", "--model", "gemma3-270m"])
    assert result.exit_code == 2
    assert "leave --model out" in result.stderr
