"""One request, from its prompt to its last token."""

from collections import deque
from collections.abc import Sequence

import attrs

from swapkv.errors import ProtocolError
from swapkv.schedulers.base import Phase


@attrs.define(eq=False, kw_only=True)
class Request:
    """A prompt, and greedy tokens until there are `max_new_tokens`; the rest is the runner's.

    `pieces`: what is still to be run, a piece a step. The last one ends with the newest token and gives a new one; those
    before it are a prompt's beginning or were known before, and only their KV is wanted.
    `recomputed_tokens`: tokens whose KV was there and was dropped. `restores_ns`: how long each restore took, from the
    scheduler's word to all layers being on the device, the wait for pages included.
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
    restores_ns: list[int] = attrs.field(factory=list)

    @prompt.validator
    def _check_prompt(self, attribute: object, prompt: Sequence[int]) -> None:
        if not prompt:
            raise ProtocolError(f"request {self.name!r} has an empty prompt: begin it with at least one token")

    @max_new_tokens.validator
    def _check_new(self, attribute: object, tokens: int) -> None:
        if tokens < 1:
            raise ProtocolError(f"request {self.name!r}: max_new_tokens={tokens} must be at least 1")

    @property
    def has_all_tokens(self) -> bool:
        return len(self.output) >= self.max_new_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens of KV at its end: the last token that is generated is never run."""
        return len(self.prompt) + self.max_new_tokens - 1

    def take(self, token: int) -> None:
        """The first piece was run and this came after it: a new token, or one that is known."""
        self.pieces.popleft()
        if not self.pieces:
            self.output.append(token)
            self.slice_tokens += 1
            self.pieces.append([token])

    def begin(self) -> None:
        """Nothing of it has been run: the prompt comes first."""
        self.pieces = deque([list(self.prompt)])

    def begin_again_exactly(self) -> None:
        """Its KV is gone: run the same tokens in the same pieces as before, so that every bit returns."""
        self.begin()
        self.pieces.extend([token] for token in self.output)

    def begin_again_at_once(self) -> None:
        """Its KV is gone: run all that is known as one prompt, as engines do. Sums may round differently."""
        self.pieces = deque([[*self.prompt, *self.output]])
