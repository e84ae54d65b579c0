"""Waiting that would never end."""

import anyio
import pytest

from swapkv import NeverFits, PagesExhausted, ProtocolError, TransferError, open_pool
from swapkv.fsm import commands, events
from swapkv.fsm.queries import SequenceState
from swapkv.ids import Lane, SeqId
from swapkv.streams.host import HostDevice, Operation, Work
from tests.kit.stage import Stage
from tests.kit.writing import Writer
from tests.test_pool import small_layout

LONG_S = 60.0


def restores_behind_a_head_that_cannot_run(*, in_order_only: bool = False) -> None:
    """`in_order_only`: ends are told only while the head of the queue can run."""
    stage = Stage(pages=8)
    for name in ("a", "b", "c"):
        stage.parked(name, 7)
    for name in ("a", "b"):
        assert stage.restore(name)
    assert stage.free == 0
    assert stage.restore("c", priority=-1)
    stage.run_eagerly(Lane.IN)
    while stage.reports and not in_order_only:
        stage.tell()
    for name in ("a", "b"):
        assert stage.told(commands.Restored, name), f"{name} waits for the head of the queue"
        stage.reads(name)
    assert stage.state("c") is SequenceState.PREFETCHING
    assert stage.preempt("a")
    stage.come_to_rest()
    assert stage.told(commands.Restored, "c")
    stage.reads("c")


def test_restores_behind_a_head_that_cannot_run_complete_all_the_same() -> None:
    """KF-23: ends are taken in apart from admission, and the head runs once somebody leaves."""
    restores_behind_a_head_that_cannot_run()


def test_restores_looked_at_in_the_order_of_the_queue_only_are_caught() -> None:
    """KF-23, without its guard."""
    with pytest.raises(AssertionError, match="waits for the head"):
        restores_behind_a_head_that_cannot_run(in_order_only=True)


def test_request_larger_than_the_pool_is_refused_at_once_by_its_numbers() -> None:
    """KF-24."""
    stage = Stage(pages=49)
    register = events.Register(SeqId("a"), 126)
    with pytest.raises(NeverFits, match=r"needs 63 pages .* the pool has 49"):
        stage.core.handle(register, 0)
    assert not stage.core.sequences


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_request_that_outgrows_the_pool_fails_alone_and_its_pages_come_free(anyio_backend: str) -> None:
    """KF-24: nobody is left that could make room."""
    async with open_pool(small_layout(), num_pages=6, host_bytes=1 << 16) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=24)
        pool.register("b", max_tokens=24)
        await writer.append({"a": 16})
        await writer.append({"b": 8})
        with anyio.fail_after(LONG_S):
            with pytest.raises(PagesExhausted, match="preempt or finish"):
                await writer.append({"a": 8})
            await writer.append({"b": 0})
            await pool.finish("a")
            await writer.append({"b": 16})
        await writer.check("b")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_gates_of_a_sequence_that_is_on_the_device_are_open(anyio_backend: str) -> None:
    """A restore with nothing to do lands all layers at once: a stream that waits for one goes on."""
    async with open_pool(small_layout(), num_pages=6, host_bytes=1 << 16) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=24)
        await writer.append({"a": 9})
        with anyio.fail_after(LONG_S):
            async with pool.restoring("a") as coming, pool.forward({"a": 1}) as forward:
                for layer in range(pool.layout.num_layers):
                    coming.gate(layer, forward.stream)
                    await coming.wait_layer(layer)
                await forward.run(lambda: writer.write(forward, {"a": 1}))
        writer.written["a"].append("a")
        await writer.check("a")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_layers_asked_for_before_the_restore_began_are_refused(anyio_backend: str) -> None:
    """Nobody would ever tell that they are there."""
    async with open_pool(small_layout(), num_pages=6, host_bytes=1 << 16) as pool:
        pool.register("a", max_tokens=24)
        coming = pool.restoring("a")
        for ask in (lambda: coming.layer_event(0), lambda: coming.gate(0, pool.compute)):
            with pytest.raises(ProtocolError, match="async with"):
                ask()
        with pytest.raises(ProtocolError, match="async with"):
            await coming.wait_layer(0)


class OneBadRestore(HostDevice):
    """Copies to the device wait for `go`, then fail."""

    def __init__(self) -> None:
        super().__init__()
        self.go = self.create_promise()

    def execute(self, operation: Operation) -> None:
        if operation.work is Work.SCATTER and operation.blocks:
            self.go.wait(LONG_S)
            raise OSError("link down")
        super().execute(operation)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("forked", [False, True])
async def test_gate_that_fails_with_no_work_behind_it_fails_nobody_elses(forked: bool, anyio_backend: str) -> None:
    """A restore of one sequence fails; the next forward of another, whose tail has to be copied, is not touched."""
    device = OneBadRestore()
    async with open_pool(small_layout(), num_pages=12, host_bytes=1 << 16, device=device) as pool:
        writer = Writer(pool)
        for name in ("a", "b"):
            pool.register(name, max_tokens=24)
            await writer.append({name: 7})
        await pool.preempt("a")
        if forked:
            writer.fork("b", "c", max_tokens=24)
        with pytest.raises(TransferError, match="link down"):  # noqa: PT012
            async with pool.restoring("a") as coming, pool.forward({"a": 0}) as forward:
                coming.gate(1, forward.stream)
                device.go.set()
        await writer.append({"b": 2})
        await writer.check("b")
        assert pool.state("a") is SequenceState.OFFLOADED


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_tail_copied_while_a_failed_gate_is_pending_is_copied(anyio_backend: str) -> None:
    """The forward whose gate failed is still open: a clone for another one runs, and the pool lives on."""
    device = OneBadRestore()
    async with open_pool(small_layout(), num_pages=12, host_bytes=1 << 16, device=device) as pool:
        writer = Writer(pool)
        for name in ("a", "b"):
            pool.register(name, max_tokens=24)
            await writer.append({name: 7})
        await pool.preempt("a")
        writer.fork("b", "c", max_tokens=24)
        with pytest.raises(TransferError, match="link down"):  # noqa: PT012
            async with pool.restoring("a") as coming, pool.forward({"a": 0}) as forward:
                coming.gate(1, forward.stream)
                device.go.set()
                with pytest.raises(TransferError, match="link down"):
                    await coming.wait_layer(1)
                async with pool.forward({"b": 2}) as other:
                    with pytest.raises(TransferError, match="was not run"):
                        await forward.run(lambda: None)
                    await other.run(lambda: writer.write(other, {"b": 2}))
                writer.written["b"] += ["b"] * 2
        for name in ("b", "c"):
            await writer.check(name)
