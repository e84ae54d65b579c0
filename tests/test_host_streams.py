"""Streams of the host device: order, waits, and what a failure fails."""

import threading
from collections.abc import Callable
from itertools import count

import pytest
import torch

from swapkv.config import Verify
from swapkv.errors import ChecksumMismatch, ProtocolError, TransferError
from swapkv.ids import LayerId
from swapkv.streams.base import Block, Region
from swapkv.streams.host import HostDevice, Operation, Work
from tests.host_devices import LONG_S, NEW, OLD, nothing, one_page, opened


class FaultyDevice(HostDevice):
    """Fails its work number `failing`, counted from 0."""

    def __init__(self, failing: int) -> None:
        super().__init__(name="faulty")
        self._failing = failing
        self._count = count()

    def execute(self, operation: Operation) -> None:
        if next(self._count) == self._failing:
            raise OSError("injected")
        super().execute(operation)


def test_stream_given_much_work_runs_it_in_order_on_its_own_thread() -> None:
    seen: list[tuple[int, str]] = []

    def note(number: int) -> Callable[[], None]:
        return lambda: seen.append((number, threading.current_thread().name))

    with opened(HostDevice(name="order")) as device:
        stream = device.create_stream("compute")
        for number in range(200):
            stream.launch(note(number))
        assert stream.record().wait(LONG_S)
        assert seen == [(number, "swapkv-order-compute") for number in range(200)]


def test_launch_of_a_callable_hands_back_what_it_returns() -> None:
    with opened(HostDevice()) as device:
        launched = device.create_stream("compute").launch(lambda: 41 + 1)
        assert launched.wait(LONG_S)
        assert launched.query()
        assert launched.result() == 42


@pytest.mark.parametrize("error", [ValueError("mine"), AssertionError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_launch_of_a_callable_that_raises_hands_it_back_and_fails_nothing_else(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with opened(HostDevice()) as device:
        stream, other = device.create_stream("compute"), device.create_stream("out")
        launched = stream.launch(fail)
        other.wait(launched)
        after = other.launch(lambda: "ran")
        assert launched.wait(LONG_S)
        assert after.wait(LONG_S)
        assert after.result() == "ran"
        with pytest.raises(type(error)) as caught:
            launched.result()
        assert caught.value is error


def test_results_asked_for_before_the_work_is_over_are_refused() -> None:
    with opened(HostDevice()) as device:
        stream, gate = device.create_stream("compute"), device.create_promise()
        stream.wait(gate)
        launched, copied = stream.launch(nothing), stream.gather([one_page(device)], Verify.CRC32)
        assert not launched.query()
        assert not copied.wait(0.0)
        with pytest.raises(ProtocolError, match="wait"):
            launched.result()
        with pytest.raises(ProtocolError, match="wait"):
            copied.checksums()
        gate.set()


def test_record_covers_what_was_given_before_it_and_nothing_later() -> None:
    with opened(HostDevice()) as device:
        stream, gates = device.create_stream("compute"), [device.create_promise() for _ in range(2)]
        assert stream.record().query()
        stream.wait(gates[0])
        first = stream.record()
        stream.wait(gates[1])
        second = stream.record()
        assert not first.query()
        gates[0].set()
        assert first.wait(LONG_S)
        assert not second.query()
        gates[1].set()
        assert second.wait(LONG_S)


def test_wait_for_an_event_of_another_stream_orders_the_two() -> None:
    seen: list[str] = []
    with opened(HostDevice()) as device:
        first, second, gate = device.create_stream("compute"), device.create_stream("out"), device.create_promise()
        first.wait(gate)
        written = first.launch(lambda: seen.append("write"))
        second.wait(written)
        read = second.launch(lambda: seen.append("read"))
        gate.set()
        assert read.wait(LONG_S)
    assert seen == ["write", "read"]


@pytest.mark.parametrize("cause", [OSError("link down"), TransferError("tier is gone")])
def test_wait_for_a_failed_promise_fails_the_next_work_only(cause: Exception) -> None:
    with opened(HostDevice()) as device:
        stream, promise = device.create_stream("in"), device.create_promise()
        block = one_page(device)
        stream.wait(promise)
        copied, after, reached = stream.gather([block], Verify.NONE), stream.launch(lambda: "ran"), stream.record()
        promise.set(cause)
        with pytest.raises(TransferError, match="was not run") as caught:
            copied.wait(LONG_S)
        assert copied.query()
        chain = [caught.value.__cause__, caught.value.__cause__.__cause__ if caught.value.__cause__ else None]
        assert cause in chain
        with pytest.raises(TransferError):
            copied.checksums()
        assert reached.wait(LONG_S)
        assert after.result() == "ran"
        assert not block.host[0].any()


def test_waits_that_fail_twice_chain_the_first_and_are_used_up_together() -> None:
    with opened(HostDevice()) as device:
        stream, promises = device.create_stream("in"), [device.create_promise() for _ in range(2)]
        for number, promise in enumerate(promises):
            promise.set(OSError(f"number {number}"))
            stream.wait(promise)
        failed, after = stream.launch(nothing), stream.launch(nothing)
        with pytest.raises(TransferError) as caught:
            failed.wait(LONG_S)
        assert "number 0" in str(caught.value.__cause__)
        with pytest.raises(TransferError):
            failed.result()
        assert after.wait(LONG_S)


def test_wait_for_a_foreign_event_that_raises_anything_fails_the_next_work() -> None:
    class Foreign:
        def query(self) -> bool:
            return True

        def wait(self, timeout_s: float | None = None) -> bool:
            raise ValueError("not one of ours")

    with opened(HostDevice()) as device:
        stream = device.create_stream("in")
        stream.wait(Foreign())
        with pytest.raises(TransferError) as caught:
            stream.launch(nothing).wait(LONG_S)
        assert isinstance(caught.value.__cause__, ValueError)


def test_promise_set_twice_keeps_the_first_decision() -> None:
    device = HostDevice()
    reached, failed = device.create_promise(), device.create_promise()
    assert not reached.query()
    assert not reached.wait(0.0)
    reached.set()
    reached.set(OSError("late"))
    failed.set(OSError("first"))
    failed.set()
    assert reached.wait()
    assert failed.query()
    with pytest.raises(TransferError, match="first"):
        failed.wait()


def test_wait_within_a_callable_blocks_there() -> None:
    with opened(HostDevice()) as device:
        stream, gate, started = device.create_stream("compute"), device.create_promise(), threading.Event()
        page: list[int] = []

        def forward() -> list[int]:
            started.set()
            stream.wait(gate)
            return list(page)

        launched = stream.launch(forward)
        assert started.wait(LONG_S)
        page.append(NEW)
        gate.set()
        assert launched.wait(LONG_S)
        assert launched.result() == [NEW]


def test_wait_within_a_callable_for_a_failed_event_raises_there() -> None:
    with opened(HostDevice()) as device:
        stream, promise = device.create_stream("compute"), device.create_promise()
        promise.set(OSError("layer 3 is lost"))
        launched, after = stream.launch(lambda: stream.wait(promise)), stream.launch(lambda: "ran")
        assert after.wait(LONG_S)
        assert after.result() == "ran"
        with pytest.raises(TransferError, match="layer 3 is lost"):
            launched.result()


def test_record_within_a_callable_is_reached_where_it_stands() -> None:
    with opened(HostDevice()) as device:
        compute, out, gate = device.create_stream("compute"), device.create_stream("out"), device.create_promise()
        seen: list[str] = []

        def forward() -> None:
            out.wait(compute.record())
            assert out.launch(lambda: seen.append("layer 0 copied")).wait(LONG_S)
            seen.append("layer 1 computed")

        launched = compute.launch(forward)
        compute.wait(gate)
        assert launched.wait(LONG_S)
        launched.result()
        assert seen == ["layer 0 copied", "layer 1 computed"]
        gate.set()


def test_wait_within_a_callable_for_later_work_of_its_stream_is_refused() -> None:
    with opened(HostDevice()) as device:
        stream = device.create_stream("compute")
        launched = stream.launch(lambda: stream.launch(nothing).wait())
        assert launched.wait(LONG_S)
        with pytest.raises(ProtocolError, match="would never end"):
            launched.result()


def test_failed_copy_fails_its_own_event_and_no_other() -> None:
    with opened(FaultyDevice(failing=1)) as device:
        stream = device.create_stream("out")
        blocks = [one_page(device) for _ in range(3)]
        events = [stream.gather([block], Verify.NONE) for block in blocks]
        assert stream.record().wait(LONG_S)
        with pytest.raises(TransferError, match="gather on stream 'out' failed") as caught:
            events[1].wait(LONG_S)
        assert isinstance(caught.value.__cause__, OSError)
        assert events[0].wait(LONG_S)
        assert events[2].wait(LONG_S)
        assert [bool(block.host[0].any()) for block in blocks] == [True, False, True]


def test_copies_with_verify_carry_checksums_and_refuse_altered_bytes() -> None:
    with opened(HostDevice()) as device:
        out, into, block = device.create_stream("out"), device.create_stream("in"), one_page(device, NEW)
        copied = out.gather([block], Verify.CRC32)
        assert copied.wait(LONG_S)
        (_, checksum) = copied.checksums()
        stored = Block(
            regions=block.regions, pages=torch.tensor([0]), host=block.host, guarded=block.guarded, checksums=[checksum]
        )
        block.regions[0].pages.fill_(OLD)
        restored = into.scatter([stored], Verify.CRC32)
        assert restored.wait(LONG_S)
        assert restored.checksums() == ()
        assert block.regions[0].pages.tolist() == [[NEW] * 16, [OLD] * 16]
        block.regions[0].pages.fill_(OLD)
        block.host[0][0, 3] = 77
        with pytest.raises(ChecksumMismatch, match="layer 0"):
            into.scatter([stored], Verify.CRC32).wait(LONG_S)
        assert block.regions[0].pages.eq(OLD).all()


def test_clone_in_a_stream_copies_pages_of_every_region() -> None:
    with opened(HostDevice()) as device:
        stream = device.create_stream("compute")
        regions = [Region(layer=LayerId(0), name=name, pages=device.allocate(8).view(4, 2)) for name in ("k", "v")]
        for region in regions:
            region.pages[3] = NEW
        assert stream.clone(regions, torch.tensor([3]), torch.tensor([0])).wait(LONG_S)
        for region in regions:
            assert region.pages[:, 0].tolist() == [NEW, 0, 0, NEW]


def test_ill_formed_work_is_refused_before_it_is_queued() -> None:
    with opened(HostDevice(queue_depth=1)) as device:
        stream, block = device.create_stream("out"), one_page(device)
        stray = Block(regions=block.regions, pages=torch.tensor([2]), host=block.host, guarded=block.guarded)
        for copy in (stream.gather, stream.scatter):
            with pytest.raises(ProtocolError, match="page 2"):
                copy([block, stray], Verify.NONE)
        with pytest.raises(ProtocolError, match="1 source pages for 2 target"):
            stream.clone(block.regions, torch.tensor([0]), torch.tensor([0, 1]))
        with pytest.raises(ProtocolError, match="page -1"):
            stream.clone(block.regions, torch.tensor([0]), torch.tensor([-1]))
        assert stream.launch(nothing).wait(LONG_S)


def copy_of_gated_write(*, waits: bool) -> int:
    """What a gather finds in a page whose writer is held back until the gather is over, if it can be."""
    with opened(HostDevice()) as device:
        compute, out, gate = device.create_stream("compute"), device.create_stream("out"), device.create_promise()
        block = one_page(device, OLD)
        compute.wait(gate)
        written = compute.launch(lambda: block.regions[0].pages.fill_(NEW))
        if waits:
            out.wait(written)
        copied = out.gather([block], Verify.NONE)
        if not waits:
            assert copied.wait(LONG_S)
        gate.set()
        assert copied.wait(LONG_S)
        return int(block.host[0][0, 0])


def copy_of_page_written_again(*, waits: bool) -> int:
    """What a gather that is held back finds in a page that is then written again, as soon as it can be."""
    with opened(HostDevice()) as device:
        compute, out, gate = device.create_stream("compute"), device.create_stream("out"), device.create_promise()
        block = one_page(device, OLD)
        out.wait(gate)
        copied = out.gather([block], Verify.NONE)
        if waits:
            compute.wait(copied)
        written = compute.launch(lambda: block.regions[0].pages.fill_(NEW))
        if not waits:
            assert written.wait(LONG_S)
        gate.set()
        assert written.wait(LONG_S)
        assert copied.wait(LONG_S)
        return int(block.host[0][0, 0])


def test_gather_that_waits_for_its_writer_copies_what_was_written() -> None:
    assert copy_of_gated_write(waits=True) == NEW


def test_gather_without_the_wait_for_its_writer_copies_stale_bytes() -> None:
    assert copy_of_gated_write(waits=False) == OLD


def test_writer_that_waits_for_the_gather_leaves_it_the_old_bytes() -> None:
    assert copy_of_page_written_again(waits=True) == OLD


def test_writer_without_the_wait_for_the_gather_overtakes_it() -> None:
    assert copy_of_page_written_again(waits=False) == NEW


def test_work_hook_of_a_device_sees_every_operation_but_waits() -> None:
    seen: list[tuple[Work, str, int]] = []

    class Spy(HostDevice):
        def execute(self, operation: Operation) -> None:
            seen.append((operation.work, operation.stream, len(operation.blocks)))
            super().execute(operation)

    with opened(Spy()) as device:
        stream, block = device.create_stream("s"), one_page(device)
        stream.wait(stream.gather([block], Verify.NONE))
        stream.scatter([block, block], Verify.NONE)
        stream.clone(block.regions, block.pages, block.pages)
        assert stream.launch(nothing).wait(LONG_S)
    assert seen == [(Work.GATHER, "s", 1), (Work.SCATTER, "s", 2), (Work.CLONE, "s", 0), (Work.LAUNCH, "s", 0)]
