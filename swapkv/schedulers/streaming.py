"""The other reference engine loop: every request is in every step; what does not fit the device is read in host memory."""

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import anyio
import attrs

from swapkv.errors import PagesExhausted, PoolBroken, PoolClosed, ProtocolError
from swapkv.fsm.transitions import ChunkState
from swapkv.pool import Pool
from swapkv.schedulers.base import Phase
from swapkv.schedulers.request import Request
from swapkv.schedulers.runner import BatchRow, Model

_HERE = frozenset({ChunkState.GPU_RESIDENT, ChunkState.GPU_READY})


@attrs.define(eq=False)
class StreamRunner:
    """Runs requests to their end, all of them in every step.

    When a step lacks pages, the request with the most chunks on the device spills the oldest of them. `model` has to
    read what `Forward.layer_kv` says, not page tables alone. For one layer group without a window; else `ProtocolError`.
    `on_finish` is awaited for each request when its last token is there. `steps`: forwards so far. `idle_ns`: how long
    none could run because all waited for spills.
    """

    _pool: Pool
    _model: Model
    _on_finish: Callable[[Request], Awaitable[None]] | None = None
    requests: list[Request] = attrs.field(factory=list, init=False)
    steps: int = attrs.field(default=0, init=False)
    idle_ns: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        groups = self._pool.layout.groups
        if len(groups) > 1 or groups[0].window is not None:
            raise ProtocolError(
                f"a layout of {len(groups)} layer groups, the first with window={groups[0].window}: this loop spills one "
                "group without a window; use Runner, or call pool.spill yourself"
            )

    async def run(self, requests: Sequence[Request]) -> None:
        """Run all `requests`, which are new.

        Raises `NeverFits` for a request that the pool could not hold even alone, `PagesExhausted` if the begun chunks of
        all requests do not fit together, and what the model, `on_finish` or a spill raises. Then, and when cancelled,
        every request of this run is finished and its memory is free.
        """
        self.requests = []
        try:
            for request in requests:
                self._pool.register(request.name, max_tokens=request.total_tokens)
                self.requests.append(request)
                request.begin()
                request.phase = Phase.RUNNING
            while running := [request for request in self.requests if request.phase is Phase.RUNNING]:
                await self._step(running)
        finally:
            with anyio.CancelScope(shield=True), suppress(PoolClosed, PoolBroken):
                for request in self.requests:
                    if request.phase is not Phase.DONE:
                        await self._pool.finish(request.name)

    async def _step(self, running: Sequence[Request]) -> None:
        appends = {request.name: len(request.pieces[0]) for request in running}
        try:
            async with self._pool.forward(appends) as forward:
                rows = [BatchRow(name=r.name, tokens=r.pieces[0], start=forward.tokens(r.name)) for r in running]
                next_tokens = await forward.run(self._model(forward, rows))
        except PagesExhausted as error:
            await self._spill_one(running, error)
            return
        self.steps += 1
        for request, token in zip(running, next_tokens, strict=True):
            request.take(token)
            if request.has_all_tokens:
                await self._finish(request)

    async def _spill_one(self, running: Sequence[Request], error: PagesExhausted) -> None:
        """The request with the most whole chunks on the device spills the oldest one of them."""
        begin_ns = time.monotonic_ns()
        here = {request.name: self._whole_chunks_here(request.name) for request in running}
        name = max(here, key=lambda name: len(here[name]))
        if not here[name]:
            raise PagesExhausted(
                f"{len(running)} requests do not fit together, not even with all whole chunks in host memory: run fewer at "
                f"once, or give the pool more pages ({error})"
            ) from error
        await self._pool.spill(name, tokens=(here[name][0] + 1) * self._pool.layout.chunk_tokens)
        self.idle_ns += time.monotonic_ns() - begin_ns

    def _whole_chunks_here(self, name: str) -> list[int]:
        """Numbers of the sequence's chunks that are full and on the device."""
        whole = self._pool.tokens(name) // self._pool.layout.chunk_tokens
        states = self._pool.chunk_states(name)[:whole]
        return [number for number, state in enumerate(states) if state in _HERE]

    async def _finish(self, request: Request) -> None:
        if self._on_finish is not None:
            await self._on_finish(request)
        request.phase = Phase.DONE
        await self._pool.finish(request.name)
