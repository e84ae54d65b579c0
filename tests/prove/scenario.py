"""What a world begins with, and how much may happen in it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import attrs

from swapkv.config import SwapConfig
from swapkv.ids import GroupId
from swapkv.layout import KVLayout

Action: TypeAlias = tuple[str | int, ...]
"""A verb and what it is about: `("preempt", "a")`, `("run", "OUT")`, `("deliver", "done", 3)`."""

BUDGETS = ("preempt", "cancel", "fault", "void", "truncate", "fork", "abort", "hang", "evict", "die", "spill")


@attrs.frozen(kw_only=True)
class Scenario:
    """One bounded world. `about`: what is in it, in a few words.

    `targets[name]`: the lengths, in tokens, that the sequence reaches step by step; then it is finished.
    `begun`: actions that lead to the first state; they use up no budget. `host_chunks`: host slots.
    `children`: names that forks may take. `gates`: steps may begin on an open gate. `batch`: sequences in one step.
    `budget`: how many of each of `BUDGETS` may happen. `repeats`: completions may be reported again.
    `in_order`: each lane's reports come in its order, though not those of different lanes.
    `late`: a sequence may be preempted after its last step.
    `rude`: wishes are also made in states that refuse them. `priorities`: of restores, by name. `ranks`: devices that
    do the same, each in its own time.
    """

    name: str
    about: str
    layout: KVLayout
    pages: tuple[int, ...]
    host_chunks: int
    config: SwapConfig = attrs.field(factory=SwapConfig)
    targets: Mapping[str, tuple[int, ...]]
    begun: tuple[Action, ...] = ()
    children: tuple[str, ...] = ()
    gates: bool = False
    batch: int = 1
    budget: Mapping[str, int] = attrs.field(default=MappingProxyType({}))
    in_order: bool = False
    late: bool = False
    repeats: bool = False
    rude: bool = False
    priorities: Mapping[str, int] = attrs.field(default=MappingProxyType({}))
    ranks: int = 1

    kinds: Mapping[str, int] = attrs.field(init=False)
    """Which sequences are alike: those with equal numbers may be exchanged for one another."""

    @kinds.default
    def _kinds(self) -> dict[str, int]:
        scripts = [(targets, self.priorities.get(name, 0)) for name, targets in self.targets.items()]
        return {name: scripts.index(script) for name, script in zip(self.targets, scripts, strict=True)}

    def __attrs_post_init__(self) -> None:
        assert set(self.budget) <= set(BUDGETS), set(self.budget) - set(BUDGETS)

    @property
    def host_bytes(self) -> int:
        return self.host_chunks * max(self.layout.chunk_bytes(GroupId(g)) for g in range(len(self.layout.groups)))
