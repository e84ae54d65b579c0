"""Which sequence should leave the device: the score of DESIGN, as a pure formula."""

from collections.abc import Callable, Iterable, Sequence

import attrs

from swapkv.ids import SeqId


@attrs.frozen(kw_only=True)
class Victim:
    """What it would mean to preempt one sequence.

    `freed_bytes`: device bytes that come free. `dirty_bytes`: bytes without a clean copy, which must cross the link.
    `restore_bytes`: bytes that come back when it resumes. `resume_probability`: 0 to 1. `fairness_ns`: a penalty for
    one that has just been restored or preempted often. `reuse_loss_ns`: what others lose (shared chunks).
    """

    sequence: SeqId
    freed_bytes: int
    dirty_bytes: int
    restore_bytes: int
    resume_probability: float = 1.0
    fairness_ns: float = 0.0
    reuse_loss_ns: float = 0.0


def score(victim: Victim, *, out_ns_per_byte: float, in_ns_per_byte: float) -> float:
    """Device bytes freed for each nanosecond that preempting costs; higher is the better victim.

    freed / (D2H cost of dirty bytes + P(resume) * H2D cost + fairness penalty + reuse loss). A fixed microsecond keeps
    the quotient finite.
    """
    cost_ns = (
        victim.dirty_bytes * out_ns_per_byte
        + victim.resume_probability * victim.restore_bytes * in_ns_per_byte
        + victim.fairness_ns
        + victim.reuse_loss_ns
    )
    return victim.freed_bytes / (cost_ns + 1_000.0)


def rank(victims: Iterable[Victim], *, out_ns_per_byte: float, in_ns_per_byte: float) -> list[Victim]:
    """Best victim first; equal scores in the order of their names, so that the answer is always the same."""

    def key(victim: Victim) -> tuple[float, SeqId]:
        return (-score(victim, out_ns_per_byte=out_ns_per_byte, in_ns_per_byte=in_ns_per_byte), victim.sequence)

    return sorted((v for v in victims if v.freed_bytes), key=key)


def choose(ranked: Iterable[Victim], suffices: Callable[[Sequence[Victim]], bool]) -> list[Victim]:
    """Just enough of the victims, taken in their order, that `suffices`; all of them when even that is too little.

    None of them could be spared: those that a larger one after them makes superfluous are left out, the worst first.
    """
    chosen: list[Victim] = []
    for victim in ranked:
        if suffices(chosen):
            break
        chosen.append(victim)
    for victim in reversed(chosen[:]):
        others = [other for other in chosen if other is not victim]
        if suffices(others):
            chosen = others
    return chosen
