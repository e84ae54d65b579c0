"""A pool for the fake model, requests to run in it, and what must hold when they have ended."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from swapkv import (
    HostDevice,
    Pool,
    SwapConfig,
    open_pool,
)
from swapkv.schedulers import Phase, Request, RoundRobin
from tests.kit.fake_model import fake_generate, fake_layout

PROMPTS = ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17])


def requests_of(*lengths: int, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Request]:
    """One request for each number of new tokens."""
    return [
        Request(name=f"r{n}", prompt=prompts[n % len(prompts)], max_new_tokens=length)
        for n, length in enumerate(lengths)
    ]


@asynccontextmanager
async def pool_of(
    pages: int = 64,
    *,
    page_size: int = 4,
    host_chunks: int = 64,
    config: SwapConfig | None = None,
    device: HostDevice | None = None,
) -> AsyncIterator[Pool]:
    """A pool that must be empty in the end."""
    layout = fake_layout(page_size, chunk_tokens=max(8, page_size))
    chunk_bytes = layout.chunk_bytes(0)  # type: ignore[arg-type]
    async with open_pool(
        layout, num_pages=pages, host_bytes=host_chunks * chunk_bytes, config=config, device=device
    ) as pool:
        yield pool
        assert_empty(pool)


def assert_empty(pool: Pool) -> None:
    pool._core.check()
    statistics = pool.statistics()
    assert statistics.sequences == {}
    assert statistics.host_bytes_used == 0
    counts = statistics.pages[0]
    assert counts.free + counts.fenced + counts.quarantined == counts.total


def assert_right(requests: Sequence[Request]) -> None:
    """Every request has ended, with the tokens that it must have."""
    for request in requests:
        assert request.phase is Phase.DONE
        assert request.output == fake_generate(request.prompt, request.max_new_tokens), request.name


def round_robin(slots: int = 2, quantum: int = 3, swaps: int = 1) -> RoundRobin:
    return RoundRobin(slots=slots, quantum_tokens=quantum, concurrent_swaps=swaps)
