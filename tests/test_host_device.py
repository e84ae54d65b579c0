"""The host device: limits of queues and link, memory, and the close."""

import threading
from itertools import count

import pytest
import torch

from swapkv.config import Verify
from swapkv.errors import BudgetExhausted, DrainTimeout, PoolClosed, ProtocolError
from swapkv.streams.host import HostDevice
from tests.host_devices import LONG_S, nothing, one_page, opened, threads_of


class FrozenClock:
    """Time that stands still, and what was slept in it."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def monotonic_ns(self) -> int:
        return 5_000_000_000

    def sleep(self, seconds: float, /) -> None:
        self.slept.append(seconds)


class JumpingClock(FrozenClock):
    """Time that moves by `step_ns` whenever it is read."""

    def __init__(self, step_ns: int) -> None:
        super().__init__()
        self._times = count(0, step_ns)

    def monotonic_ns(self) -> int:
        return next(self._times)


def test_full_queue_is_refused_and_takes_work_again_once_some_is_over() -> None:
    with opened(HostDevice(queue_depth=3)) as device:
        stream, gate = device.create_stream("in"), device.create_promise()
        stream.wait(gate)
        stream.launch(nothing)
        last = stream.launch(nothing)
        for give in (lambda: stream.launch(nothing), lambda: stream.wait(gate)):
            with pytest.raises(BudgetExhausted, match=r"'in' holds 3 .*queue_depth=3: wait for some"):
                give()
        gate.set()
        assert last.wait(LONG_S)
        assert stream.launch(nothing).wait(LONG_S)


@pytest.mark.parametrize("value", [0, -5])
def test_device_limits_below_one_are_refused(value: int) -> None:
    with pytest.raises(ProtocolError, match=f"link_bytes_per_s={value} must be at least 1, or None"):
        HostDevice(link_bytes_per_s=value)
    with pytest.raises(ProtocolError, match=f"queue_depth={value} must be at least 1"):
        HostDevice(queue_depth=value)


def test_limited_link_carries_each_direction_by_itself_over_all_streams() -> None:
    clock = FrozenClock()
    with opened(HostDevice(link_bytes_per_s=8, clock=clock)) as device:
        block, streams = one_page(device), [device.create_stream(name) for name in ("out", "in", "also out")]
        assert streams[0].gather([block, block], Verify.NONE).wait(LONG_S)
        assert clock.slept == [4.0]
        assert streams[1].scatter([block], Verify.NONE).wait(LONG_S)
        assert clock.slept == [4.0, 2.0]
        assert streams[2].gather([block], Verify.NONE).wait(LONG_S)
        assert clock.slept == [4.0, 2.0, 6.0]
        assert streams[2].gather([], Verify.NONE).wait(LONG_S)
        assert streams[2].clone(block.regions, block.pages, block.pages).wait(LONG_S)
        assert clock.slept == [4.0, 2.0, 6.0, 6.0]


class SetClock(FrozenClock):
    """Time that is set; to sleep takes longer than was asked for, as threads do."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float, /) -> None:
        super().sleep(seconds)
        self.now_ns += round((seconds + 0.5) * 1e9)


class Gate:
    """An event that tells when a stream has come to it."""

    def __init__(self) -> None:
        self.come_to, self.open = threading.Event(), threading.Event()

    def query(self) -> bool:
        self.come_to.set()
        return self.open.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.open.wait(LONG_S)


def test_link_goes_on_with_a_copy_that_was_ready_however_late_its_thread_wakes() -> None:
    clock = SetClock()
    with opened(HostDevice(link_bytes_per_s=8, clock=clock)) as device:
        stream, block, gate = device.create_stream("in"), one_page(device), Gate()
        stream.wait(gate)
        stream.scatter([block], Verify.NONE)
        last = stream.scatter([block], Verify.NONE)
        assert gate.come_to.wait(LONG_S)
        clock.now_ns = 10**9
        gate.open.set()
        assert last.wait(LONG_S)
    assert clock.slept == [2.0, 1.5], "the first begins when its wait is over; of the second half a second is over"


def test_limited_link_slower_than_the_copy_itself_does_not_sleep() -> None:
    clock = JumpingClock(step_ns=3_000_000_000)
    with opened(HostDevice(link_bytes_per_s=8, clock=clock)) as device:
        stream, block = device.create_stream("out"), one_page(device)
        for _ in range(2):
            assert stream.gather([block], Verify.NONE).wait(LONG_S)
    assert clock.slept == []


def test_memory_of_any_size_is_zeroed_and_aligned() -> None:
    device = HostDevice()
    for allocate in (device.allocate, device.allocate_pinned):
        for num_bytes in (0, 1, 5000):
            memory = allocate(num_bytes)
            assert memory.dtype == torch.uint8
            assert tuple(memory.shape) == (num_bytes,)
            assert not memory.any()
            assert num_bytes == 0 or memory.data_ptr() % 4096 == 0
    with pytest.raises(ProtocolError, match="num_bytes=-1"):
        device.allocate(-1)
    with pytest.raises(BudgetExhausted, match="ask for less"):
        device.allocate_pinned(1 << 60)


def test_close_lets_given_work_end_and_takes_no_more() -> None:
    device = HostDevice(name="clean")
    stream, other, promise = device.create_stream("compute"), device.create_stream("out"), device.create_promise()
    block = one_page(device)
    launched = [stream.launch(lambda: 1) for _ in range(50)]
    other.wait(launched[-1])
    copied = other.gather([block], Verify.NONE)
    assert len(threads_of(device)) == 2
    assert device.close(LONG_S) == []
    assert threads_of(device) == []
    assert sum(event.result() for event in launched) == 50
    assert copied.wait(0.0)
    for give in (
        lambda: stream.wait(promise),
        lambda: stream.record(),
        lambda: stream.launch(nothing),
        lambda: stream.gather([block], Verify.NONE),
        lambda: stream.scatter([block], Verify.NONE),
        lambda: stream.clone(block.regions, block.pages, block.pages),
        lambda: device.create_stream("late"),
        lambda: device.create_promise(),
    ):
        with pytest.raises(PoolClosed):
            give()
    assert device.close(LONG_S) == []


def test_close_of_idle_streams_without_any_time_is_clean() -> None:
    device = HostDevice(name="idle")
    assert device.create_stream("out").launch(nothing).wait(LONG_S)
    device.create_stream("in")
    assert device.close(0.0) == []
    assert threads_of(device) == []


def test_close_with_a_stuck_callable_names_its_stream_and_fails_what_is_left() -> None:
    device = HostDevice(name="stuck")
    compute, idle, promise = device.create_stream("compute"), device.create_stream("idle"), device.create_promise()
    started, release, block = threading.Event(), threading.Event(), one_page(device)

    def block_thread() -> str:
        started.set()
        release.wait()
        return "too late"

    earlier, running = compute.launch(lambda: "in time"), compute.launch(block_thread)
    assert started.wait(LONG_S)
    queued, point, over = compute.gather([block], Verify.NONE), compute.record(), idle.launch(lambda: "in time")
    assert over.wait(LONG_S)
    assert device.close(0.0) == ["compute"]
    (thread,) = threads_of(device)
    for event in (running, queued, point, promise):
        assert event.query()
        with pytest.raises(DrainTimeout):
            event.wait(LONG_S)
    for event in (earlier, over):
        assert event.wait(0.0)
        assert event.result() == "in time"
    assert device.close(LONG_S) == ["compute"]

    release.set()
    thread.join(LONG_S)
    assert not thread.is_alive()
    with pytest.raises(DrainTimeout):
        running.result()
    assert not block.host[0].any()


def test_close_with_a_stream_that_waits_for_an_unset_promise_ends_its_thread() -> None:
    device = HostDevice(name="waiting")
    stream, promise = device.create_stream("in"), device.create_promise()
    stream.wait(promise)
    event = stream.launch(nothing)
    threads = threads_of(device)
    assert device.close(0.0) == ["in"]
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    with pytest.raises(DrainTimeout):
        event.wait()


def test_close_from_a_stream_of_the_device_is_refused() -> None:
    with opened(HostDevice()) as device:
        launched = device.create_stream("compute").launch(lambda: device.close(LONG_S))
        assert launched.wait(LONG_S)
        with pytest.raises(ProtocolError, match="another thread"):
            launched.result()
