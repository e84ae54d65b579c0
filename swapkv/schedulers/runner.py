"""The reference engine loop: continuous batching over the requests that are on the device, swaps beside it."""

import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from typing import Protocol

import anyio
import anyio.abc
import attrs

from swapkv.errors import PagesExhausted, ProtocolError, WouldBlock
from swapkv.fsm.commands import PreemptOutcome
from swapkv.pool import Pool
from swapkv.schedulers.base import Phase, Plan, RequestView, Scheduler
from swapkv.sessions import AsyncForward


class Handover(Enum):
    """How one request makes room for the next."""

    SWAP = "swap"
    """Its KV is offloaded while the others run."""
    STOP_THE_WORLD = "stop the world"
    """The same, but nothing runs until the swap is over."""
    RECOMPUTE = "recompute"
    """Its KV is dropped; when it comes back, prompt and output are prefilled again."""


@attrs.define(eq=False, kw_only=True)
class Request:
    """One request: a prompt, and greedy tokens until there are `max_new_tokens`.

    `pieces`: what still has to be run before the next token is new: the prompt, or what was dropped.
    `stalls_ns`: for each restore, from the scheduler's word to the last layer's arrival.
    Raises `ProtocolError` for an empty prompt, or no token to generate.
    """

    name: str
    prompt: Sequence[int] = attrs.field()
    max_new_tokens: int = attrs.field()
    output: list[int] = attrs.field(factory=list)
    phase: Phase = Phase.WAITING
    pieces: deque[list[int]] = attrs.field(factory=deque)
    slice_tokens: int = 0
    waiting_since_ns: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    stalls_ns: list[int] = attrs.field(factory=list)

    @prompt.validator
    def _check_prompt(self, attribute: object, prompt: Sequence[int]) -> None:
        if not prompt:
            raise ProtocolError(f"request {self.name!r} has an empty prompt: begin it with at least one token")

    @max_new_tokens.validator
    def _check_new(self, attribute: object, tokens: int) -> None:
        if tokens < 1:
            raise ProtocolError(f"request {self.name!r}: max_new_tokens={tokens} must be at least 1")

    @property
    def done(self) -> bool:
        return len(self.output) >= self.max_new_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens of KV at its end: the last token that is generated is never run."""
        return len(self.prompt) + max(0, self.max_new_tokens - 1)


@attrs.frozen(kw_only=True)
class BatchRow:
    """One request's part of a step: `tokens` at positions `start`, `start + 1`, …"""

    name: str
    tokens: Sequence[int]
    start: int


class Model(Protocol):
    """What runs a step: returns the next token of each row. Called on the pool's compute stream."""

    def __call__(self, forward: AsyncForward, rows: Sequence[BatchRow]) -> Callable[[], list[int]]:
        """Prepare a step on the event loop; the answer runs it."""


class Runner:
    """Runs requests to their end on one pool.

    `on_finish` is awaited for each request when its last token is there and its KV still on the device.
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
        self._pool = pool
        self._scheduler = scheduler
        self._model = model
        self._handover = handover
        self._on_finish = on_finish
        self._changed = anyio.Event()

    async def run(self, requests: Sequence[Request]) -> None:
        """Run all `requests`, beginning now. Raises `NeverFits` for one that the pool could never hold.

        Cancelled, every request of this run is finished and its memory is free.
        """
        self.requests = list(requests)
        now_ns = time.monotonic_ns()
        for request in self.requests:
            self._pool.register(request.name, max_tokens=max(1, request.total_tokens))
            request.pieces.append(list(request.prompt))
            request.waiting_since_ns = now_ns
        try:
            async with anyio.create_task_group() as group:
                while any(request.phase is not Phase.DONE for request in self.requests):
                    await self._apply(self._scheduler.plan(self._views()), group)
                    await self._step()
        finally:
            with anyio.CancelScope(shield=True):
                for request in self.requests:
                    if request.phase is not Phase.DONE:
                        await self._pool.finish(request.name)

    async def _apply(self, plan: Plan, group: anyio.abc.TaskGroup) -> None:
        """Start what the scheduler wants; with the world stopped, wait for it as well."""
        by_name = {request.name: request for request in self.requests}
        moves: list[Callable[[], Coroutine[None, None, None]]] = []
        for name in plan.leave:
            by_name[name].phase = Phase.LEAVING
            moves.append(partial(self._leave, by_name[name]))
        for name in plan.come:
            request = by_name[name]
            if request.phase is Phase.WAITING:
                self._arrive(request)
                continue
            request.phase = Phase.COMING
            moves.append(partial(self._come, request))
        if self._handover is Handover.STOP_THE_WORLD:
            async with anyio.create_task_group() as stopped:
                for move in moves:
                    stopped.start_soon(move)
        else:
            for move in moves:
                group.start_soon(move)

    async def _leave(self, request: Request) -> None:
        request.preemptions += 1
        if self._handover is Handover.RECOMPUTE:
            self._pool.evict(request.name)
            outcome = PreemptOutcome.RECOMPUTE
        else:
            outcome = await self._pool.preempt(request.name)
        request.waiting_since_ns = time.monotonic_ns()
        request.phase = Phase.OFF
        if outcome is PreemptOutcome.RECOMPUTE:
            self._start_over(request)
        self._wake()

    async def _come(self, request: Request) -> None:
        begin_ns = time.monotonic_ns()
        await self._pool.resume(request.name)
        request.stalls_ns.append(time.monotonic_ns() - begin_ns)
        self._arrive(request)

    def _arrive(self, request: Request) -> None:
        request.phase = Phase.RUNNING
        request.slice_tokens = 0
        request.waiting_since_ns = 0
        self._wake()

    def _start_over(self, request: Request) -> None:
        """Its KV is gone. As a fallback the tokens are run exactly as before, one by one, so that every bit returns."""
        self._pool.reset(request.name)
        known = request.output[:-1]
        request.recomputed_tokens += len(request.prompt) + len(known)
        if self._handover is Handover.RECOMPUTE:
            request.pieces = deque([[*request.prompt, *known]])
        else:
            request.pieces = deque([list(request.prompt), *([token] for token in known)])
        request.pieces.append(request.output[-1:])
        request.phase = Phase.WAITING

    async def _step(self) -> None:
        """One forward over all that run; without any, wait until something has changed."""
        running = [request for request in self.requests if request.phase is Phase.RUNNING]
        entered = self._enter(running)
        if entered is None:
            await self._wait_for_room(running)
            return
        batch, context = entered
        with context as forward:
            rows = [BatchRow(name=r.name, tokens=r.pieces[0], start=forward.tokens(r.name)) for r in batch]
            next_tokens = await forward.run(self._model(forward, rows))
        self.steps += 1
        for request, token in zip(batch, next_tokens, strict=True):
            await self._take(request, token)

    def _enter(self, running: list[Request]) -> tuple[list[Request], AbstractContextManager[AsyncForward]] | None:
        """Get pages for as many of `running` as there are pages for; those that add most tokens are left out first."""
        batch = sorted(running, key=lambda request: len(request.pieces[0]))
        while batch:
            try:
                return batch, self._pool.forward_nowait({r.name: len(r.pieces[0]) for r in batch})
            except (WouldBlock, PagesExhausted):
                batch.pop()
        return None

    async def _wait_for_room(self, running: list[Request]) -> None:
        """Nothing can run: wait for what is coming or leaving; if nothing is, one that runs has to leave."""
        if running and not any(r.phase in (Phase.COMING, Phase.LEAVING) for r in self.requests):
            names = [str(victim.sequence) for victim in self._pool.victims()]
            victims = [r for name in names for r in running if r.name == name and r.output]
            if len(running) < 2 or not victims:
                raise PagesExhausted(
                    f"{[r.name for r in running]} cannot go on: the pool has too few pages even for what runs now; give "
                    "it more, or the scheduler fewer slots"
                )
            victims[0].phase = Phase.LEAVING
            await self._leave(victims[0])
            return
        await self._changed.wait()
        self._changed = anyio.Event()

    async def _take(self, request: Request, token: int) -> None:
        """A row's token: new, or known from before it was dropped."""
        request.pieces.popleft()
        if request.pieces:
            return
        request.output.append(token)
        request.slice_tokens += 1
        request.pieces.append([token])
        if request.done:
            if self._on_finish is not None:
                await self._on_finish(request)
            await self._pool.finish(request.name)
            request.phase = Phase.DONE

    def _views(self) -> list[RequestView]:
        best_first = self._pool.victims() if self._scheduler.wants_scores else []
        scores = {str(victim.sequence): float(-place) for place, victim in enumerate(best_first)}
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

    def _wake(self) -> None:
        self._changed.set()
