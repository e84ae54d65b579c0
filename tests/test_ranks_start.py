"""How ranks begin: what they agree on, and who is refused."""

from collections.abc import Iterator
from typing import Any

import anyio
import attrs
import pytest

from swapkv import HostDevice, PagedMemory, ProtocolError, Verify
from swapkv.ranks import RankGroup, RankLost, RankOptions, RankWorker, open_ranked_pool, open_ranked_stepped_pool
from swapkv.ranks.agreement import agree
from swapkv.ranks.messages import Hello
from tests.kit.ranks import HOST_BYTES, LAYOUT, PAGES, PATIENT, Workers, memory_ranks, no_thread_left


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    with no_thread_left():
        yield


def test_leader_with_memory_of_its_own_uses_the_first_pages() -> None:
    groups = memory_ranks(2)
    device = HostDevice()
    memory = PagedMemory.allocate(LAYOUT, [PAGES] * 2, device)
    workers = Workers(LAYOUT, groups, [5, 9], HOST_BYTES)
    with open_ranked_stepped_pool(
        LAYOUT, ranks=groups[0], num_pages=PAGES, host_bytes=HOST_BYTES, device=device, memory=memory
    ) as pool:
        assert [pages.total for pages in pool.statistics().pages] == [5, 9]
        assert pool.memory.plane(0, "k").data_ptr() == memory.plane(0, "k").data_ptr()
        assert len(pool.memory.plane(0, "k")) == 5
    workers.join()


@pytest.mark.anyio
async def test_ranks_of_unlike_layouts_are_all_refused_by_field_and_rank() -> None:
    groups = memory_ranks(3)
    other = attrs.evolve(LAYOUT, chunk_tokens=16)
    workers = Workers(LAYOUT, groups, PAGES, HOST_BYTES, {2: other})
    named = r"chunk_tokens: 8 on ranks \[0, 1\], 16 on ranks \[2\]"
    with pytest.raises(ProtocolError, match=named):
        async with open_ranked_pool(LAYOUT, ranks=groups[0], num_pages=PAGES, host_bytes=HOST_BYTES):
            pass
    workers.join()
    for rank in (1, 2):
        with pytest.raises(ProtocolError, match=named):
            raise workers.ended[rank]  # type: ignore[misc]


def test_rank_that_calls_itself_another_is_refused() -> None:
    own, other = (Hello(rank, 2 + rank, (1,), 0, {}) for rank in range(2))
    with pytest.raises(ProtocolError, match="rank 1 of 2 calls itself 1 of 3"):
        agree({0: own, 1: other}, Verify.NONE)


def test_fields_that_one_rank_lacks_are_named() -> None:
    own, other = Hello(0, 2, (1,), 0, {"x": "1"}), Hello(1, 2, (1,), 0, {})
    with pytest.raises(ProtocolError, match=r"x: 1 on ranks \[0\], absent on ranks \[1\]"):
        agree({0: own, 1: other}, Verify.NONE)


def test_rank_that_does_not_come_is_named_and_the_others_are_let_go() -> None:
    groups = memory_ranks(3)
    workers = Workers(LAYOUT, groups[:2], PAGES, HOST_BYTES)
    hasty = attrs.evolve(groups[0], options=attrs.evolve(PATIENT, start_timeout_s=2.0))
    with (
        pytest.raises(RankLost, match="rank 2 of 3"),
        open_ranked_stepped_pool(LAYOUT, ranks=hasty, num_pages=PAGES, host_bytes=HOST_BYTES),
    ):
        pass
    workers.join()
    assert isinstance(workers.ended[1], ProtocolError)


@pytest.mark.anyio
async def test_cancelled_open_lets_the_ranks_go() -> None:
    groups = memory_ranks(3)
    workers = Workers(LAYOUT, groups[:2], PAGES, HOST_BYTES)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def open_it() -> None:
                async with open_ranked_pool(LAYOUT, ranks=groups[0], num_pages=PAGES, host_bytes=HOST_BYTES):
                    raise AssertionError("rank 2 is not there")

            tasks.start_soon(open_it)
            await anyio.wait_all_tasks_blocked()
            groups[2].channels[0].close()
            scope.cancel()
    workers.join()
    assert isinstance(workers.ended[1], ProtocolError | RankLost)


def test_group_with_the_wrong_channels_is_refused() -> None:
    for rank, size in ((0, 2), (1, 2), (2, 2)):
        with pytest.raises(ProtocolError, match="channels"):
            RankGroup(rank=rank, size=size, channels={})
    with pytest.raises(ProtocolError, match="rank 0 leads"):
        RankWorker(LAYOUT, ranks=memory_ranks(1)[0], num_pages=1, host_bytes=0)


@pytest.mark.parametrize(
    "wrong", [{"heartbeat_s": 0.0}, {"deadline_s": -1.0}, {"heartbeat_s": 2.0, "deadline_s": 3.0}, {"backlog_max": 0}]
)
def test_options_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        RankOptions(**wrong)
