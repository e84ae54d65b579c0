"""Which waiting restore may take pages now, so that no two partial restores ever block each other."""

from collections.abc import Sequence
from enum import Enum

import attrs


@attrs.frozen(kw_only=True)
class Waiting:
    """A restore that still lacks pages. `missing`: pages by layer group. `held`: pages it has been granted so far."""

    missing: tuple[int, ...]
    held: tuple[int, ...]


class Grant(Enum):
    """What one restore may take."""

    ALL = "all"
    SOME = "some"
    NOTHING = "nothing"
    REVOKE = "revoke"
    """Give back what it holds: the head needs it."""


def plan(waiting: Sequence[Waiting], available: Sequence[int], coming: Sequence[int]) -> list[Grant]:
    """One answer for each restore, `waiting` being in the order in which they should run.

    Only the head may hold a part of its pages and wait for more. Anybody else takes all that it needs from what is
    left beyond the head's need, or nothing; so whatever holds pages can complete. A part held by one that is no
    longer the head is given back when the head could not complete from `available` + `coming` without it.
    """
    if not waiting:
        return []
    head, *others = waiting
    left = [a - m for a, m in zip(available, head.missing, strict=True)]
    grants = [Grant.ALL if min(left) >= 0 else Grant.SOME]
    short = [-(have + more) for have, more in zip(left, coming, strict=True)]
    revoked = set()
    for index in reversed(range(len(others))):
        held = others[index].held
        if any(lack > 0 and has > 0 for lack, has in zip(short, held, strict=True)):
            revoked.add(index)
            short = [lack - has for lack, has in zip(short, held, strict=True)]
    for index, other in enumerate(others):
        after = [have - need for have, need in zip(left, other.missing, strict=True)]
        if index in revoked:
            grants.append(Grant.REVOKE)
        elif all(rest >= 0 for rest, need in zip(after, other.missing, strict=True) if need):
            grants.append(Grant.ALL)
            left = after
        else:
            grants.append(Grant.NOTHING)
    return grants


def effective_priority(priority: int, waited_ns: int, aging_ns: int, aging_cap: int) -> int:
    """`priority` (lower runs first) less one step for every `aging_ns` waited, at most `aging_cap` steps.

    The cap keeps an old request of low priority from shutting out every new one of high priority.
    """
    return priority - min(waited_ns // aging_ns, aging_cap)
