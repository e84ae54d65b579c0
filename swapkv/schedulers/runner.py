"""The reference engine loop: continuous batching over the requests that are on the device, swaps beside it."""

import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from enum import Enum
from functools import partial
from typing import Protocol, TypeAlias

import anyio
import attrs
from anyio.abc import TaskGroup

from swapkv.errors import ChecksumMismatch, PagesExhausted, PoolBroken, PoolClosed, ProtocolError, WouldBlock
from swapkv.forward import Forward
from swapkv.fsm.commands import PreemptOutcome
from swapkv.pool import Pool
from swapkv.schedulers.base import Phase, Plan, RequestView, Scheduler
from swapkv.schedulers.request import Request
from swapkv.schedulers.tasks import plain_task_group
from swapkv.sessions import AsyncForward

_Move: TypeAlias = Callable[[], Coroutine[None, None, None]]


class Handover(Enum):
    """How one request makes room for the next."""

    SWAP = "swap"
    """Its KV is offloaded while the others run."""
    STOP_THE_WORLD = "stop the world"
    """The same, but nothing runs until the swap is over. The pages have to suffice for all that the scheduler lets run:
    a restore that lacks pages would wait for ever for those that stand still."""
    RECOMPUTE = "recompute"
    """Its KV is dropped; when it comes back, prompt and output are prefilled again."""


@attrs.frozen(kw_only=True)
class BatchRow:
    """One request's part of a step: `tokens` at positions `start`, `start + 1`, …"""

    name: str
    tokens: Sequence[int]
    start: int


class Model(Protocol):
    """What runs a step."""

    def __call__(self, forward: Forward, rows: Sequence[BatchRow]) -> Callable[[], list[int]]:
        """Prepare a step, on the event loop. The answer runs it, on the pool's compute stream: a token for each row."""


class Runner:
    """Runs requests to their end on one pool.

    `on_finish` is awaited for each request when its last token is there and its KV still on the device.
    `steps`: forwards so far. `idle_ns`: how long no forward could run because all waited for swaps.
    """

    def __init__(
        self,
        pool: Pool,
        scheduler: Scheduler,
        model: Model,
        *,
        handover: Handover = Handover.SWAP,
        on_finish: Callable[[Request], Awaitable[None]] | None = None,
    ) -> None:
        self.requests: list[Request] = []
        self.steps = 0
        self.idle_ns = 0
        self._pool = pool
        self._scheduler = scheduler
        self._model = model
        self._handover = handover
        self._on_finish = on_finish
        self._crowded = False
        self._changed = anyio.Event()

    async def run(self, requests: Sequence[Request]) -> None:
        """Run all `requests`, which are new, beginning now.

        A request whose KV is lost, because the host tier was full or a copy's checksum was wrong, runs its tokens again.
        Raises `NeverFits` for a request that the pool could not hold even alone, `ProtocolError` for a plan that makes
        no sense, and what the model, `on_finish` or a swap raises. Then, and when cancelled, every request of this run
        is finished and its memory is free.
        """
        self.requests = []
        try:
            for request in requests:
                self._pool.register(request.name, max_tokens=request.total_tokens)
                self.requests.append(request)
                request.begin()
                request.waiting_since_ns = time.monotonic_ns()
            async with plain_task_group() as group:
                while any(request.phase is not Phase.DONE for request in self.requests):
                    await self._apply(self._scheduler.plan(self._views()), group)
                    await self._make_room(group)
                    await self._step()
        finally:
            await self._give_up()

    async def _apply(self, plan: Plan, group: TaskGroup) -> None:
        """Start what the scheduler wants; with the world stopped, wait for it as well."""
        moves: list[_Move] = []
        for name in plan.leave:
            request = self._planned(name, Phase.RUNNING)
            request.phase = Phase.LEAVING
            moves.append(partial(self._leave, request))
            self._crowded = False
        for name in () if self._crowded else plan.come:
            request = self._planned(name, Phase.WAITING, Phase.OFF)
            if request.phase is Phase.WAITING:
                self._arrive(request)
            else:
                request.phase = Phase.COMING
                moves.append(partial(self._come, request, time.monotonic_ns()))
        await self._begin(moves, group)

    async def _begin(self, moves: Sequence[_Move], group: TaskGroup) -> None:
        """Start swaps; with the world stopped, wait for them as well."""
        if self._handover is not Handover.STOP_THE_WORLD:
            _start(moves, group)
        elif moves:
            with self._idle():
                async with plain_task_group() as stopped:
                    _start(moves, stopped)

    def _planned(self, name: str, *phases: Phase) -> Request:
        """The request of this name, which has to be in one of `phases`."""
        request = next((r for r in self.requests if r.name == name), None)
        if request is None or request.phase not in phases:
            found = "not a request of this run" if request is None else request.phase.value
            wanted = " or ".join(phase.value for phase in phases)
            raise ProtocolError(f"the plan moves {name!r}, which is {found}: plan only what is {wanted}")
        return request

    async def _leave(self, request: Request) -> None:
        if self._handover is Handover.RECOMPUTE:
            self._pool.evict(request.name)
            outcome = PreemptOutcome.RECOMPUTE
        else:
            outcome = await self._pool.preempt(request.name)
        request.preemptions += 1
        request.waiting_since_ns = time.monotonic_ns()
        request.phase = Phase.OFF
        if outcome is PreemptOutcome.RECOMPUTE:
            self._start_over(request)
        self._changed.set()

    async def _come(self, request: Request, decided_ns: int) -> None:
        try:
            await self._pool.resume(request.name)
        except ChecksumMismatch:
            self._pool.evict(request.name)
            self._start_over(request)
        else:
            request.restores_ns.append(time.monotonic_ns() - decided_ns)
            self._arrive(request)
        self._changed.set()

    def _arrive(self, request: Request) -> None:
        request.phase = Phase.RUNNING
        request.slice_tokens = 0
        request.waiting_since_ns = 0

    def _start_over(self, request: Request) -> None:
        """Its KV is gone, on every tier."""
        request.recomputed_tokens += self._pool.tokens(request.name)
        self._pool.reset(request.name)
        if self._handover is Handover.RECOMPUTE:
            request.begin_again_at_once()
        else:
            request.begin_again_exactly()
        request.phase = Phase.WAITING

    async def _make_room(self, group: TaskGroup) -> None:
        """If there are too few pages for all that have KV, make just enough of them leave, so that the others go on.

        Then nobody comes until another request has left or is done; else two could push each other out for ever.
        """
        there = [r for r in self.requests if r.phase is Phase.RUNNING and self._pool.tokens(r.name)]
        just_come = {request.name for request in there if request.slice_tokens == 0}
        names = [str(victim.sequence) for victim in self._pool.victims_for(_appends(there), spare=just_come)]
        if not names or len(names) == len(there):
            return
        victims = [request for request in there if request.name in names]
        for victim in victims:
            victim.phase = Phase.LEAVING
        self._crowded = True
        await self._begin([partial(self._leave, victim) for victim in victims], group)

    async def _step(self) -> None:
        """One forward over all that run; without any, wait until something has changed."""
        running = [request for request in self.requests if request.phase is Phase.RUNNING]
        if not running:
            await self._wait_for_swap()
            return
        async with AsyncExitStack() as stack:
            try:
                batch, forward = await self._enter(stack, running)
            except PagesExhausted as error:
                await self._give_way(running, error)
                return
            rows = [BatchRow(name=r.name, tokens=r.pieces[0], start=forward.tokens(r.name)) for r in batch]
            next_tokens = await forward.run(self._model(forward, rows))
        self.steps += 1
        for request, token in zip(batch, next_tokens, strict=True):
            request.take(token)
            if request.has_all_tokens:
                await self._finish(request)

    async def _enter(self, stack: AsyncExitStack, running: list[Request]) -> tuple[list[Request], AsyncForward]:
        """Get pages for as many of `running` as there are pages for, for one of them if need be by waiting.

        Those that add most tokens are left out first. Raises `PagesExhausted` if not even one gets its pages.
        """
        by_need = sorted(running, key=lambda request: len(request.pieces[0]))
        for count in range(len(by_need), 0, -1):
            batch = by_need[:count]
            with suppress(WouldBlock, PagesExhausted):
                return batch, stack.enter_context(self._pool.forward_nowait(_appends(batch)))
        with self._idle():
            return batch, await stack.enter_async_context(self._pool.forward(_appends(batch)))

    async def _give_way(self, running: list[Request], error: PagesExhausted) -> None:
        """None of `running` gets its pages: wait for a request that is leaving, or make one leave."""
        phases = {request.phase for request in self.requests}
        others = len(running) > 1 or Phase.COMING in phases
        victim = self._victim(running) if others else None
        if Phase.LEAVING in phases or (victim is None and Phase.COMING in phases):
            await self._wait_for_swap()
        elif victim is None:
            names = [request.name for request in running]
            raise PagesExhausted(f"{names} cannot go on, and nothing is there that could make room: {error}") from error
        else:
            self._crowded = True
            victim.phase = Phase.LEAVING
            with self._idle():
                await self._leave(victim)

    def _victim(self, running: Sequence[Request]) -> Request | None:
        """The pool's best victim among those that have KV; one that has only just come is spared if possible."""
        with_kv = {request.name: request for request in running if request.output}
        best_first = [with_kv[name] for name in self._victims() if name in with_kv]
        return min(best_first, key=lambda request: request.slice_tokens == 0, default=None)

    async def _wait_for_swap(self) -> None:
        """Wait until a swap has ended; one that has ended since the last call counts, so none is missed."""
        if any(request.phase in (Phase.COMING, Phase.LEAVING) for request in self.requests):
            with self._idle():
                await self._changed.wait()
            self._changed = anyio.Event()
        elif self._crowded:
            self._crowded = False
        else:
            raise ProtocolError("nothing is on the device, nothing is coming, and the plan lets nobody come: let one")

    async def _finish(self, request: Request) -> None:
        if self._on_finish is not None:
            await self._on_finish(request)
        request.phase = Phase.DONE
        self._crowded = False
        await self._pool.finish(request.name)

    async def _give_up(self) -> None:
        """Finish what the run leaves behind."""
        with anyio.CancelScope(shield=True), suppress(PoolClosed, PoolBroken):
            for request in self.requests:
                if request.phase is not Phase.DONE:
                    await self._pool.finish(request.name)

    def _views(self) -> list[RequestView]:
        scores = {name: -place for place, name in enumerate(self._victims())} if self._scheduler.wants_scores else {}
        return [
            RequestView(
                name=request.name,
                phase=request.phase,
                slice_tokens=request.slice_tokens,
                waiting_since_ns=request.waiting_since_ns,
                remaining_tokens=request.max_new_tokens - len(request.output),
                score=scores.get(request.name, float("-inf")),
            )
            for request in self.requests
        ]

    def _victims(self) -> list[str]:
        """Names of those that could be preempted now, the best victim first."""
        return [str(victim.sequence) for victim in self._pool.victims()]

    @contextmanager
    def _idle(self) -> Iterator[None]:
        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.idle_ns += time.monotonic_ns() - begin_ns


def _start(moves: Sequence[_Move], group: TaskGroup) -> None:
    for move in moves:
        group.start_soon(move)


def _appends(batch: Sequence[Request]) -> dict[str, int]:
    return {request.name: len(request.pieces[0]) for request in batch}
