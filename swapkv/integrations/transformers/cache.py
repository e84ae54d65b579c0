"""A cache for transformers' `generate` whose KV lives in a pool: it can leave the device and come back byte for byte."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Self

import torch
from transformers.cache_utils import Cache

from swapkv.errors import BudgetExhausted, KVEvicted, PagesExhausted, PoolClosed, ProtocolError, WouldBlock
from swapkv.fsm.commands import ParkUndone, PreemptOutcome, RestoreUndone
from swapkv.fsm.queries import SequenceState
from swapkv.integrations.transformers.attention import CACHE_ATTENTION_NAME, Call, Ticket
from swapkv.integrations.transformers.layer import CacheLayer
from swapkv.integrations.transformers.step import Step
from swapkv.integrations.transformers.streaming import Streaming
from swapkv.stepdriver import News
from swapkv.stepped import SteppedPool

TIMEOUT_S = 30.0

_AWAY = frozenset([SequenceState.OFFLOADED, SequenceState.PREFETCHING])


class SwapKVCache(Cache):
    """The KV of a batch, each row a sequence of a pool. For models with the attention `"swapkv"`.

        model.set_attn_implementation("swapkv")
        with SwapKVCache(pool, ["a", "b"], max_tokens=512) as cache:
            model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=64)
            cache.preempt()  # all of it leaves the device
            cache.restore()  # and is back; generate may go on with longer ids and the same cache

    A call of the model is one forward of the pool, over all rows. It begins when layer 0 attends and ends when the last
    layer has. One that raises, or does not come to its last layer, is void: its tokens do not count, and the cache can
    be used as if it had not been. Between forwards, also within `generate` (a logits processor, a streamer), rows may be
    preempted and restored, here or through the pool. A row may also go on while its first tokens are in host memory
    (`spill`): attention reads them through a ring of staging buffers, with the same bits.
    If one raises `PagesExhausted` within `generate`, what it had generated is lost to its caller but not to the cache:
    make room, then go back with `crop` or `reset`, and call again. `make_room` below avoids that.
    Padding is neither stored nor seen: rows hold only the tokens that `attention_mask` names, so left, right and inner
    padding give what the row alone would. What the model returns at padding itself means nothing.
    `generate` with beams needs a name for each beam of each row. All calls belong on the pool's thread.
    """

    def __init__(
        self,
        pool: SteppedPool,
        names: Sequence[str],
        *,
        max_tokens: int,
        step_tokens: int | None = None,
        priority: int = 0,
        timeout_s: float = TIMEOUT_S,
        ring_depth: int = 2,
        make_room: Callable[[Mapping[str, int]], object] | None = None,
        on_news: Callable[[News], object] | None = None,
    ) -> None:
        """Register a sequence for each row. The pool's layout is `layout_of(model.config, …)`.

        `max_tokens`: of a row, without padding. `step_tokens`: the most that one forward adds to it, see
        `BasePool.register`. `timeout_s`: how long copies may take when this cache waits for them. `ring_depth`: staging
        buffers for what is spilled, 256 tokens of one layer each, allocated with the first `spill`. `make_room`: is called
        with the new tokens by row when the pool lacks pages for them, to begin preempts of other sequences (see
        `BasePool.victims_for`); the forward waits for those, and is tried once more. `on_news`: is told what this
        cache's polls of the pool bring, so that a scheduler of the same pool misses nothing.
        Raises `NeverFits` or `ProtocolError` as `register` does, and no row is registered then.
        """
        if not names:
            raise ProtocolError("names=[] leaves no row to cache: give one name for each row of the batch")
        self._pool = pool
        self._names: list[str] = []
        self._max_tokens = max_tokens
        self._priority = priority
        self._timeout_s = timeout_s
        self._ring_depth = ring_depth
        self._streaming: Streaming | None = None
        self._make_room = make_room
        self._on_news = on_news
        self._real = torch.zeros(len(names), 0, dtype=torch.bool)
        self._step: Step | None = None
        self._offered: int | None = None
        self._origin = 0
        self._numbers = count(1)
        self._roots: dict[str, str] = {}
        layout = pool.layout
        windows = [layout.groups[group].window for group in layout.group_of_layer]
        super().__init__(layers=[CacheLayer(self, layer, window) for layer, window in enumerate(windows)])
        try:
            for name in names:
                pool.register(name, max_tokens=max_tokens, step_tokens=step_tokens, priority=priority)
                self._names.append(name)
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The pool's sequence of each row. Beam search reorders them, and puts forks in the place of some."""
        return tuple(self._names)

    @property
    def columns(self) -> int:
        """How many columns of input the cache has seen, padding included: what transformers calls its length."""
        return self._real.shape[1]

    def preempt(self) -> PreemptOutcome:
        """Take all rows off the device; those that are off it already stay there. Void a forward that was left open.

        Returns `RECOMPUTE` if the host tier was full and a row's KV was dropped instead (`SwapConfig.host_full`): then
        `reset` and run all tokens again.
        Raises `HostTierFull` if that is not allowed, `TransferError` if a copy failed, `DrainTimeout` if one takes too
        long. Rows that have left stay off the device: ask again, or `restore`.
        """
        self.void()
        try:
            for name in self._names:
                if self._pool.state(name) not in (SequenceState.OFFLOADED, SequenceState.EVICTED):
                    self._pool.preempt(name)
        except BudgetExhausted:
            for name in self._names:
                self._pool.cancel_preempt(name)
            self._drain()
            raise
        news = self._drain()
        _raise_first(item.cause for item in news if isinstance(item, ParkUndone) and item.sequence in self._names)
        dropped = any(self._pool.state(name) is SequenceState.EVICTED for name in self._names)
        return PreemptOutcome.RECOMPUTE if dropped else PreemptOutcome.OFFLOADED

    def spill(self, tokens: int | None = None) -> None:
        """Let all rows go on while their first `tokens` tokens (None: all), as far as they fill chunks, leave the device.

        Layers with a window keep theirs. `restore` brings the tokens back. Void a forward that was left open.
        Raises `HostTierFull` if the host tier has no room, `TransferError` if a copy failed, `DrainTimeout` if one takes
        too long. Rows that have spilled stay so: ask again, or `restore`.
        """
        self.void()
        if self._streaming is None:
            self._streaming = Streaming(self._pool.device, self._pool.memory, self._ring_depth)
        try:
            for name in self._names:
                self._pool.spill(name, tokens=tokens)
        except BudgetExhausted:
            for name in self._names:
                self._pool.cancel_preempt(name)
            self._drain()
            raise
        news = self._drain()
        _raise_first(item.cause for item in news if isinstance(item, ParkUndone) and item.sequence in self._names)

    def restore(self) -> None:
        """Bring all rows back, and return when their KV is on the device.

        Raises `KVEvicted` if a row's KV was dropped, `PagesExhausted` if the device has no pages for all rows,
        `TransferError` if a copy failed, `DrainTimeout` if one takes too long. Rows that came back stay on the device:
        ask again when others have left.
        """
        self.void()
        gone = [name for name in self._names if self._pool.state(name) is SequenceState.EVICTED]
        if gone:
            raise KVEvicted(f"the KV of {gone} was dropped: reset() the cache and run all tokens again")
        away = [name for name in self._names if self._pool.state(name) is not SequenceState.PREFETCHING]
        for name in away:
            self._pool.restore(name)
        news = self._drain()
        _raise_first(item.cause for item in news if isinstance(item, RestoreUndone) and item.sequence in self._names)
        waiting = [name for name in self._names if self._pool.state(name) in _AWAY]
        if waiting:
            for name in waiting:
                self._pool.cancel_restore(name)
            self._drain()
            raise PagesExhausted(f"no device pages for {waiting}: preempt or finish other sequences, then restore()")

    def void(self) -> None:
        """Give up a forward that was left open by an error, so that its pages are not pinned any more. Idempotent."""
        self._offered = None
        step, self._step = self._step, None
        if step is not None:
            step.void()

    def reset(self) -> None:
        """Let all rows begin anew, with no tokens; also those whose KV was dropped."""
        self.void()
        for name in self._names:
            if self._pool.state(name) is not SequenceState.EVICTED:
                self._pool.evict(name)
            self._pool.reset(name)
        self._real = self._real[:, :0]

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last columns, such as drafts that were rejected: `tokens_to_remove` is minus their number.

        Raises `ProtocolError` for a number above 0 or more columns than there are, for tokens that are spilled, and where
        a window has moved on by more than `layout_of(truncate_slack=…)`; rows cut before that one have lost these columns.
        """
        self.void()
        keep = self.columns + tokens_to_remove
        if tokens_to_remove > 0 or keep < 0:
            raise ProtocolError(
                f"crop({tokens_to_remove}) of {self.columns} columns: give minus the number of columns to take back"
            )
        real = self._real.clone()
        for row, name in enumerate(self._names):
            tokens = int(real[row, :keep].sum())
            if tokens < self._pool.tokens(name):
                self._pool.truncate(name, tokens=tokens)
            real[row, keep:] = False
            self._real = real
        self._real = real[:, :keep].clone()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was: rows that are wanted twice fork, unwanted ones finish.

        Raises `NeverFits` if the pool could not hold a fork; nothing has changed then.
        """
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows that share its KV. Raises as `reorder_cache`."""
        self.batch_select_indices(torch.arange(len(self._names)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order. `indices`: integers or bool, as in indexing. Raises as `reorder_cache`."""
        self.void()
        rows: list[int] = torch.arange(len(self._names))[indices.cpu()].tolist()
        names: list[str] = []
        forks: list[str] = []
        try:
            for row in rows:
                name = self._names[row]
                if name in names:
                    name = self._fork(name)
                    forks.append(name)
                names.append(name)
        except BaseException:
            for name in forks:
                self._pool.finish(name)
                del self._roots[name]
            raise
        for name in set(self._names).difference(names):
            self._pool.finish(name)
            self._roots.pop(name, None)
        self._names = names
        self._real = self._real[rows]

    def close(self) -> None:
        """Finish all rows, and void a forward that was left open. Idempotent; a pool that is closed already is fine."""
        names, self._names = self._names, []
        with suppress(PoolClosed):
            self.void()
            for name in names:
                self._pool.finish(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> Self:
        raise ProtocolError(
            "a SwapKVCache cannot be copied: use batch_repeat_interleave, or fork its names in the pool"
        )

    def offer(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `update` of a layer does: the same KV, with a ticket to this cache for the attention that follows."""
        missed, self._offered = self._offered, layer
        if layer == 0:
            self.void()
            self._offered = layer
        if missed is not None:
            self.void()
            raise ProtocolError(
                f"layer {missed} did not attend through its cache: call model.set_attn_implementation"
                f"({CACHE_ATTENTION_NAME!r}) for models that run with a SwapKVCache"
            )
        ticket = Ticket(
            layer=layer,
            window=self._pool.layout.groups[self._pool.layout.group_of_layer[layer]].window,
            attend=lambda call: self._attend(layer, call),
            refuse=self.void,
        )
        return ticket.attach(key), value

    def _fork(self, parent: str) -> str:
        """A new sequence with the tokens of `parent`, named after the one that both come from."""
        root = self._roots.get(parent, parent)
        child = f"{root}~{next(self._numbers)}"
        self._pool.fork(parent, child, max_tokens=self._max_tokens, priority=self._priority)
        self._roots[child] = root
        return child

    def _attend(self, layer: int, call: Call) -> torch.Tensor:
        """A layer's turn: the first one begins the forward, the last one ends it. If it raises, the forward is void."""
        self._offered = None
        try:
            if layer == 0:
                self._step = self._begin(call)
            if self._step is None:
                raise ProtocolError(f"layer {layer} attends, but layer 0 has not begun a forward: run the whole model")
            out = self._step.attend(layer, call)
        except BaseException:
            self.void()
            raise
        if layer == len(self.layers) - 1:
            step, self._step = self._step, None
            step.end()
            self._real = torch.cat([self._real, step.fresh], 1)
        return out

    def _begin(self, call: Call) -> Step:
        """A forward of the pool over all rows. Waits for pages that are on their way; see `SteppedPool.forward`."""
        fresh = self._fresh(call)
        appends = dict(zip(self._names, fresh.sum(1).tolist(), strict=True))
        self._tell(self._pool.poll())
        self._await_restores()
        try:
            return self._enter(appends, fresh)
        except WouldBlock:
            pass
        except PagesExhausted:
            if self._make_room is None:
                raise
            self._make_room(appends)
        self._drain()
        return self._enter(appends, fresh)

    def _await_restores(self) -> None:
        """The pool would let a forward run while layers still arrive, which attention here does not wait for."""
        if any(self._pool.state(name) is SequenceState.PREFETCHING for name in self._names):
            self._drain()
            late = [name for name in self._names if self._pool.state(name) is SequenceState.PREFETCHING]
            if late:
                raise WouldBlock(f"{late} wait for pages to come back to: preempt or finish other sequences")

    def _enter(self, appends: dict[str, int], fresh: torch.Tensor) -> Step:
        forward = self._pool.forward(appends)
        return Step(forward, self._pool.memory, self._names, fresh, self._timeout_s, self._streaming_of_rows())

    def _streaming_of_rows(self) -> Streaming | None:
        """What reads host memory, if a row is spilled, be it through the pool."""
        if self._streaming is None and any(self._pool.state(n) is SequenceState.SPILLED for n in self._names):
            self._streaming = Streaming(self._pool.device, self._pool.memory, self._ring_depth)
        return self._streaming

    def _fresh(self, call: Call) -> torch.Tensor:
        """Which columns of the call hold tokens, bool `[B, T]`."""
        rows, columns = call.key.shape[0], self.columns + call.key.shape[2]
        if rows != len(self._names):
            raise ProtocolError(f"a batch of {rows} rows came to a cache of {len(self._names)}: name each row once")
        if call.positions is not None:
            first = int(call.positions[0, 0])
            self._origin = self._origin if self.columns else first
            if call.mask is None:
                self._refuse_jump(first)
        mask = torch.ones(rows, columns, dtype=torch.bool) if call.mask is None else call.mask.bool().cpu()
        if mask.shape != (rows, columns):
            raise ProtocolError(
                f"attention_mask {tuple(mask.shape)} must be {(rows, columns)}: the {self.columns} columns that the cache "
                "has seen and the new ones; if a generate was interrupted, crop or reset the cache first"
            )
        if not torch.equal(mask[:, : self.columns], self._real):
            raise ProtocolError(
                f"attention_mask says something else of the {self.columns} columns that the cache has seen than when they "
                "were run: pass the whole mask, padding of earlier calls included"
            )
        return mask[:, self.columns :]

    def _refuse_jump(self, position: int) -> None:
        """Without a mask only positions tell that `generate` began anew while the cache holds more than its ids."""
        due = self._origin + self.columns
        if position != due:
            raise ProtocolError(
                f"the new tokens are at position {position}, the cache goes on at {due}: pass all ids so far and an "
                "attention_mask for them; if a generate was interrupted, crop or reset the cache first"
            )

    def _drain(self) -> list[News]:
        news = self._pool.drain(self._timeout_s)
        self._tell(news)
        return news

    def _tell(self, news: Sequence[News]) -> None:
        if self._on_news is not None:
            for item in news:
                self._on_news(item)


def _raise_first(causes: Iterable[Exception | None]) -> None:
    for cause in causes:
        if cause is not None:
            raise cause
