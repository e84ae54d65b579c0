"""Which way to attend to host pages: the roofline of each, from measured rates, and why the best one was chosen.

A step takes as long as the busiest of what works at the same time (Williams et al., "Roofline", 2009): the link, the
device, the host.
"""

from collections.abc import Iterable

import attrs

from swapkv.attention.streaming import LayerWork, Strategy
from swapkv.errors import ProtocolError

_NS = 1_000_000_000


@attrs.frozen(kw_only=True)
class Rates:
    """Bytes of KV per second, as measured on this machine.

    `link`: host to device. `device`, `host`: attended to there. `in_place`: host memory as the device reads it (None: it
    cannot). Raises `ProtocolError` for a rate that is not above 0.
    """

    link: float
    device: float
    host: float | None = None
    in_place: float | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("link", "device", "host", "in_place"):
            rate = getattr(self, name)
            if rate is not None and rate <= 0:
                raise ProtocolError(f"{name}={rate} bytes/s must be above 0: measure it, or None where it is optional")


@attrs.frozen(kw_only=True)
class Choice:
    """The strategy for one layer of a step. `predicted_ns`: of every strategy that is possible. `why`: in a sentence."""

    strategy: Strategy
    predicted_ns: dict[Strategy, int]
    why: str


def predict(work: LayerWork, rates: Rates) -> dict[Strategy, int]:
    """How long a layer takes each way, in nanoseconds."""
    resident, host = work.resident_bytes, work.host_bytes
    predicted = {Strategy.STREAM: max((resident + host) / rates.device, host / rates.link)}
    if rates.in_place is not None:
        predicted[Strategy.IN_PLACE] = resident / rates.device + host / min(rates.in_place, rates.device)
    if rates.host is not None:
        moved = work.exchanged_bytes / rates.link
        predicted[Strategy.HYBRID] = max(resident / rates.device, host / rates.host) + moved
    return {strategy: round(seconds * _NS) for strategy, seconds in predicted.items()}


def choose(work: LayerWork, rates: Rates, among: Iterable[Strategy] = tuple(Strategy)) -> Choice:
    """The strategy that is predicted to be the fastest; of equal ones the first of `Strategy`.

    Raises `ProtocolError` if none of `among` has the rates that it needs.
    """
    allowed = set(among)
    predicted = {strategy: ns for strategy, ns in predict(work, rates).items() if strategy in allowed}
    if not predicted:
        raise ProtocolError(f"none of {sorted(s.value for s in allowed)} has a rate: measure `host` or `in_place` too")
    best = min(predicted, key=lambda strategy: predicted[strategy])
    others = ", ".join(f"{s.value} {ns / 1e6:.3f} ms" for s, ns in predicted.items() if s is not best)
    bound = (
        "link" if work.host_bytes / rates.link > (work.resident_bytes + work.host_bytes) / rates.device else "device"
    )
    return Choice(
        strategy=best,
        predicted_ns=predicted,
        why=f"layer {work.layer}: {work.host_bytes} bytes on the host, {work.resident_bytes} on the device; "
        f"{best.value} {predicted[best] / 1e6:.3f} ms"
        + (f", {others}" if others else "")
        + f"; streaming is {bound}-bound",
    )
