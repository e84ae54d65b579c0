"""Which way to attend to host pages: the busiest of what works at the same time decides."""

import pytest

from swapkv import ProtocolError
from swapkv.attention import LayerWork, Rates, Strategy, choose, predict

MS = 1_000_000


def work(resident: int, host: int, exchanged: int = 0) -> LayerWork:
    return LayerWork(layer=3, resident_bytes=resident, host_bytes=host, exchanged_bytes=exchanged)


def test_predictions_are_those_of_the_busiest_worker() -> None:
    rates = Rates(link=1e9, device=4e9, host=2e9, in_place=0.5e9)
    assert predict(work(4_000_000, 2_000_000, 500_000), rates) == {
        Strategy.STREAM: 2 * MS,
        Strategy.IN_PLACE: 5 * MS,
        Strategy.HYBRID: round(1.5 * MS),
    }
    assert predict(work(8_000_000, 1_000_000), rates)[Strategy.STREAM] == round(2.25 * MS), "the device is the busiest"


def test_choice_follows_the_rates_and_says_why() -> None:
    on_host = choose(work(1_000_000, 9_000_000), Rates(link=1e9, device=10e9, host=5e9))
    assert on_host.strategy is Strategy.HYBRID
    assert "hybrid 1.800 ms, stream 9.000 ms" in on_host.why
    assert "link-bound" in on_host.why
    streamed = choose(work(1_000_000, 9_000_000), Rates(link=50e9, device=10e9, host=5e9))
    assert streamed.strategy is Strategy.STREAM
    assert "device-bound" in streamed.why


def test_choice_among_named_strategies_stays_among_them() -> None:
    rates = Rates(link=1e9, device=10e9, host=5e9)
    assert choose(work(0, 10**9), rates, [Strategy.STREAM]).strategy is Strategy.STREAM
    with pytest.raises(ProtocolError, match=r"none of \['in place'\] has a rate"):
        choose(work(0, 10**9), rates, [Strategy.IN_PLACE])


@pytest.mark.parametrize("name", ["link", "device", "host", "in_place"])
def test_rate_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError, match=f"{name}=0"):
        Rates(**{"link": 1.0, "device": 1.0, name: 0})
