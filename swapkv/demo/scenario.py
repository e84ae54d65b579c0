"""What the demo runs: how many requests, on how much memory, over which link."""

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cached_property
from typing import Any

import attrs

from swapkv.budget.admission import peak_need
from swapkv.config import SwapConfig, Verify
from swapkv.demo.decoder import Decoder
from swapkv.errors import ProtocolError
from swapkv.ids import GroupId
from swapkv.layout import KVLayout
from swapkv.schedulers import RoundRobin, VictimOrder

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "The three most important things about memory are",
    "A recipe for tomato soup: first,",
    "In the year 2100, people will",
    "The difference between a cat and a dog is that",
    "My favourite place in the mountains is",
    "Water boils at one hundred degrees, but",
)
MEGABYTE = 1_000_000
CHUNK_TOKENS = 32
LARGEST = 1e12


class Mode(Enum):
    """How more requests than slots are active."""

    SWAP = "swap"
    """They take turns: KV of those that wait is in host memory."""
    STREAM = "stream"
    """All are in every step: KV that does not fit is read in host memory, layer by layer, while the step computes."""


def _at_least(minimum: float, remedy: str) -> Callable[[object, Any, float | None], None]:
    """A validator; numbers that nothing else could hold are refused, too."""

    def check(instance: object, attribute: Any, value: float | None) -> None:
        if value is not None and not minimum <= value < LARGEST:
            option = "--" + attribute.name.replace("_", "-")
            raise ProtocolError(f"{option} {value} must be a number from {minimum:g} to {LARGEST:g}: {remedy}")

    return check


@attrs.frozen(kw_only=True)
class Scenario:
    """The demo's options. Rates in MB/s (a million bytes). Raises `ProtocolError` for nonsense.

    `slot_tokens`: tokens of KV that one GPU slot holds; None: what the longest request needs. `restore_mb_s`: None:
    as much as the link carries. `host_slots`: None: as many as there are requests. `repeats`: how often each way is
    timed.
    """

    mode: Mode = Mode.SWAP
    gpu_slots: int = attrs.field(default=5, validator=_at_least(1, "without a slot nothing can run"))
    requests: int = attrs.field(default=8, validator=_at_least(1, "there is nothing to run"))
    new_tokens: int = attrs.field(default=192, validator=_at_least(1, "there is nothing to generate"))
    quantum: int = attrs.field(default=32, validator=_at_least(1, "a slice has at least one token"))
    page_size: int = attrs.field(default=16, validator=_at_least(1, "a page has at least one token"))
    slot_tokens: int | None = attrs.field(default=None, validator=_at_least(1, "a slot holds at least one token"))
    host_slots: int | None = attrs.field(default=None, validator=_at_least(0, "0: nothing fits, all is recomputed"))
    link_mb_s: float = attrs.field(default=16.0, validator=_at_least(1e-3, "a link without bandwidth moves nothing"))
    restore_mb_s: float | None = attrs.field(
        default=None, validator=_at_least(1e-3, "without a budget nothing is ever restored")
    )
    victims: VictimOrder = VictimOrder.LONGEST_SLICE
    prompt: str | None = None
    seed: int = attrs.field(default=0, validator=_at_least(0, "any whole number will do"))
    repeats: int = attrs.field(default=2, validator=_at_least(1, "to time nothing, say --no-compare"))

    def __attrs_post_init__(self) -> None:
        if self.gpu_slots > self.requests:
            raise ProtocolError(
                f"--gpu-slots {self.gpu_slots} are more than --requests {self.requests}: "
                f"take at most {self.requests} slots, or more requests"
            )

    @property
    def chunk_tokens(self) -> int:
        """Tokens a chunk: small ones, so that there is something to see."""
        return -(-CHUNK_TOKENS // self.page_size) * self.page_size

    @property
    def link_bytes_per_s(self) -> int:
        return max(1, int(self.link_mb_s * MEGABYTE))

    def prompts(self) -> Sequence[str]:
        """The text of each request's prompt."""
        if self.prompt is not None:
            return [self.prompt] * self.requests
        return [PROMPTS[n % len(PROMPTS)] for n in range(self.requests)]

    def config(self) -> SwapConfig:
        """The pool's budgets; every copy is checked."""
        rate = None if self.restore_mb_s is None else max(1, int(self.restore_mb_s * MEGABYTE))
        return SwapConfig(restore_bytes_per_s=rate, verify=Verify.CRC32)


@attrs.frozen(kw_only=True, eq=False)
class Workload:
    """A scenario with a model: prompts as tokens, and sizes in pages and bytes.

    `text_note`: what a reader has to be told of the model's text; None: it is to be read.
    Raises `ProtocolError` if a slot is too small for one of the requests.
    """

    scenario: Scenario
    decoder: Decoder
    text_note: str | None = None
    prompts: Sequence[Sequence[int]] = attrs.field(init=False)

    @prompts.default
    def _encoded(self) -> Sequence[Sequence[int]]:
        return [self.decoder.encode(prompt) for prompt in self.scenario.prompts()]

    def __attrs_post_init__(self) -> None:
        slot_tokens, new_tokens = self.scenario.slot_tokens, self.scenario.new_tokens
        if slot_tokens is not None and slot_tokens < self.longest:
            raise ProtocolError(
                f"--slot-tokens {slot_tokens} is too small: a prompt of {max(map(len, self.prompts))} tokens and "
                f"{new_tokens} new ones take {self.longest}; give a slot as many, or lower --new-tokens"
            )

    @property
    def layout(self) -> KVLayout:
        return self.decoder.layout

    @cached_property
    def longest(self) -> int:
        """Tokens of KV that the longest request has at its end."""
        return max(len(prompt) for prompt in self.prompts) + self.scenario.new_tokens - 1

    def pages(self, slots: int, *, less_bytes: int = 0) -> list[int]:
        """Device pages of each layer group for `slots` requests of the longest length.

        `less_bytes`: what else has to fit in that memory.
        """
        tokens = self.scenario.slot_tokens or self.longest
        groups = [GroupId(g) for g in range(len(self.layout.groups))]
        pages = [slots * self.layout.peak_pages(group, tokens, tokens) for group in groups]
        return [n + -less_bytes // self.layout.page_bytes(group) for n, group in zip(pages, groups, strict=True)]

    def host_bytes(self) -> int:
        """The host tier's size."""
        slots = self.scenario.requests if self.scenario.host_slots is None else self.scenario.host_slots
        return slots * peak_need(self.layout, self.longest, self.longest).host_bytes

    def scheduler(self, slots: int) -> RoundRobin:
        """Round robin over `slots`."""
        return RoundRobin(slots=slots, quantum_tokens=self.scenario.quantum, victims=self.scenario.victims)
