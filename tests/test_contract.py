"""One contract for three drivers: the same scenario, told to each, makes the core decide the same things."""

import anyio
import attrs
import pytest

from swapkv import KVDtype, KVLayout, SwapConfig, SwapError, TransferError, open_pool
from swapkv.fsm import commands, events
from swapkv.fsm.core import SwapCore
from swapkv.ids import Lane, SeqId, StepId
from swapkv.simulate import VirtualCopier
from swapkv.stepdriver import StepDriver
from swapkv.stepped import open_stepped_pool
from swapkv.streams.host import HostDevice, Operation, Work
from swapkv.streams.virtual import VirtualDevice

Action = tuple[str, ...]

LAYOUT = KVLayout.dense(
    num_layers=3,
    num_kv_heads=1,
    head_dim=8,
    dtype=KVDtype.FLOAT32,
    page_size=4,
    chunk_tokens=8,
    windows=[None, 6, None],
)
CONFIG = SwapConfig(segment_bytes=512)
PAGES = 14
HOST_BYTES = 1 << 14

SCENARIOS: dict[str, list[tuple[object, ...]]] = {
    "there and back": [
        ("register", "a", 40),
        ("append", "a", 13),
        ("preempt", "a"),
        ("resume", "a"),
        ("append", "a", 3),
        ("preempt", "a"),
        ("finish", "a"),
    ],
    "fork and truncate": [
        ("register", "a", 40),
        ("append", "a", 10),
        ("fork", "a", "b", 40),
        ("append", "b", 2),
        ("preempt", "a"),
        ("preempt", "b"),
        ("resume", "a"),
        ("truncate", "a", 9),
        ("append", "a", 4),
        ("preempt", "a"),
        ("resume", "b"),
        ("finish", "a"),
        ("finish", "b"),
    ],
    "copies fail": [
        ("register", "a", 40),
        ("append", "a", 20),
        ("fail", "OUT"),
        ("preempt", "a"),
        ("preempt", "a"),
        ("fail", "IN"),
        ("resume", "a"),
        ("resume", "a"),
        ("append", "a", 1),
        ("finish", "a"),
    ],
    "memory is short": [
        ("register", "a", 40),
        ("register", "b", 40),
        ("append", "a", 36),
        ("append", "b", 36),
        ("preempt", "a"),
        ("append", "b", 36),
        ("preempt", "b"),
        ("evict", "a"),
        ("reset", "a"),
        ("append", "a", 5),
        ("resume", "b"),
        ("finish", "b"),
    ],
    "spilled": [
        ("register", "a", 40),
        ("append", "a", 20),
        ("spill", "a"),
        ("append", "a", 6),
        ("spill", "a"),
        ("fail", "IN"),
        ("resume", "a"),
        ("append", "a", 1),
        ("truncate", "a", 20),
        ("resume", "a"),
        ("preempt", "a"),
        ("spill", "a"),
        ("finish", "a"),
    ],
    "wrong calls": [
        ("preempt", "nobody"),
        ("register", "a", 400),
        ("register", "a", 8),
        ("append", "a", 9),
        ("resume", "a"),
        ("reset", "a"),
        ("finish", "a"),
        ("finish", "a"),
    ],
}


class Tape:
    """Everything that a core was told and decided, apart from time."""

    def __init__(self, core: SwapCore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        handle = core.handle

        def recorded(event: events.Event, now_ns: int) -> list[commands.Command]:
            try:
                answer = handle(event, now_ns)
            except SwapError as error:
                self.lines.append(f"{_line(event)} !! {type(error).__name__}")
                raise
            if not isinstance(event, events.Tick):
                self.lines.append(_line(event))
            self.lines.extend(f"    {_line(c)}" for c in answer if not isinstance(c, commands.WakeAt))
            core.check()
            return answer

        monkeypatch.setattr(core, "handle", recorded)


def _line(thing: object) -> str:
    fields = attrs.fields(type(thing))  # type: ignore[arg-type, misc]
    shown = {f.name: getattr(thing, f.name) for f in fields if f.name not in ("elapsed_ns", "cause", "error")}
    if isinstance(thing, commands.Copy):
        shown["items"] = [(i.chunk, i.pages.tolist(), i.first, i.host) for i in thing.items]
    if isinstance(thing, commands.ClonePages):
        shown |= {"source": thing.source.tolist(), "target": thing.target.tolist()}
    return f"{type(thing).__name__} {shown}"


class FailingDevice(HostDevice):
    """Fails the next copy of a lane once."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: set[Work] = set()

    def execute(self, operation: Operation) -> None:
        if operation.work in self.failing:
            self.failing.discard(operation.work)
            raise OSError("link down")
        super().execute(operation)

    def fail_next(self, lane: str) -> None:
        self.failing.add(Work.GATHER if lane == "OUT" else Work.SCATTER)


def on_anyio(scenario: list[tuple[object, ...]], backend: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    async def main() -> list[str]:
        device = FailingDevice()
        async with open_pool(LAYOUT, num_pages=PAGES, host_bytes=HOST_BYTES, device=device, config=CONFIG) as pool:
            tape = Tape(pool._core, monkeypatch)

            async def append(name: str, count: int) -> None:
                with pool.forward_nowait({name: count}):
                    pass

            calls = {"append": append, "preempt": pool.preempt, "spill": pool.spill}
            calls |= {"resume": pool.resume, "finish": pool.finish}
            for kind, *rest in scenario:
                try:
                    if kind == "fail":
                        device.fail_next(*rest)  # type: ignore[arg-type]
                    elif kind in calls:
                        await calls[str(kind)](*rest)  # type: ignore[operator]
                    else:
                        _at_once(pool, str(kind), rest)
                except SwapError:
                    tape.lines.append("    refused")
                await pool._driver.reached(pool.compute.record())
            return tape.lines

    return anyio.run(main, backend=backend)


def on_stepped(scenario: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    device = FailingDevice()
    with open_stepped_pool(LAYOUT, num_pages=PAGES, host_bytes=HOST_BYTES, device=device, config=CONFIG) as pool:
        tape = Tape(pool._core, monkeypatch)

        def append(name: str, count: int) -> None:
            with pool.forward({name: count}):
                pass

        calls = {"append": append, "preempt": pool.preempt, "spill": pool.spill}
        calls |= {"resume": pool.restore, "finish": pool.finish}
        for kind, *rest in scenario:
            try:
                if kind == "fail":
                    device.fail_next(*rest)  # type: ignore[arg-type]
                elif kind in calls:
                    calls[str(kind)](*rest)  # type: ignore[operator]
                else:
                    _at_once(pool, str(kind), rest)
            except SwapError:
                tape.lines.append("    refused")
            for news in pool.drain(10):
                if getattr(news, "cause", None) is not None and not isinstance(news, commands.LayersLost):
                    tape.lines.append("    refused")
        return tape.lines


def _at_once(pool: object, kind: str, rest: list[object]) -> None:
    """Calls that are the same for every pool."""
    keyword = {"register": "max_tokens", "fork": "max_tokens", "truncate": "tokens"}.get(kind)
    call = getattr(pool, kind)
    if keyword is None:
        call(*rest)
    else:
        call(*rest[:-1], **{keyword: rest[-1]})


def on_virtual(scenario: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    device = VirtualDevice()
    failing: set[Lane] = set()

    def move(copy: commands.Copy) -> tuple[int, ...]:
        if copy.lane in failing:
            failing.discard(copy.lane)
            raise TransferError("link down")
        return ()

    core = SwapCore(LAYOUT, [PAGES] * len(LAYOUT.groups), HOST_BYTES, CONFIG)
    copier = VirtualCopier(device, out_bytes_per_s=10**9, in_bytes_per_s=10**9, move=move)
    driver = StepDriver(core, copier, clock=lambda: device.now_ns)
    compute = device.create_stream("compute")
    tape = Tape(core, monkeypatch)
    steps = iter(range(1, 1000))

    def settle() -> list[object]:
        news: list[object] = list(driver.poll())
        while (at_ns := device.next_ns()) is not None:
            device.advance(at_ns)
            news += driver.poll()
        return news

    def append(name: str, count: int) -> None:
        step = StepId(next(steps))
        driver.executor.expect_forward(step, [SeqId(name)], compute)
        try:
            driver.tell(events.BeginStep(step, {SeqId(name): count}))
        except SwapError:
            driver.executor.forget_forward(step)
            raise
        driver.tell(events.EndStep(step))

    for kind, *rest in scenario:
        try:
            if kind == "fail":
                failing.add(Lane[str(rest[0])])
            elif kind == "append":
                append(*rest)  # type: ignore[arg-type]
            else:
                driver.tell(_EVENTS[str(kind)](*rest))
        except SwapError:
            tape.lines.append("    refused")
        for news in settle():
            if getattr(news, "cause", None) is not None and not isinstance(news, commands.LayersLost):
                tape.lines.append("    refused")
    return tape.lines


_EVENTS = {
    "register": events.Register,
    "preempt": events.Preempt,
    "spill": events.Spill,
    "resume": events.BeginRestore,
    "fork": events.Fork,
    "truncate": events.Truncate,
    "finish": events.Finish,
    "evict": events.Evict,
    "reset": events.Reset,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_drivers_told_the_same_decide_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = SCENARIOS[name]
    expected = on_virtual(scenario, monkeypatch)
    assert len(expected) > len(scenario)
    assert on_stepped(scenario, monkeypatch) == expected
    assert on_anyio(scenario, "asyncio", monkeypatch) == expected
    assert on_anyio(scenario, "trio", monkeypatch) == expected
