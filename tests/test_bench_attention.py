"""`swapkv bench attention`: every way gives the same bits, and what is printed is what was measured."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from swapkv import ProtocolError
from swapkv.attention import Streamer
from swapkv.bench.attention import Case, Way, measure
from swapkv.bench.attention_data import Data, Layers
from swapkv.bench.attention_selected import Selected, Selection, Selector
from swapkv.cli import main
from swapkv.streams.host import HostDevice

TINY = {
    "context": 200,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "layers": 2,
    "page_size": 8,
    "split_tokens": 32,
    "steps": 2,
    "repeats": 1,
}
OPTIONS = [text for name, value in TINY.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def test_bench_of_every_way_gives_equal_bits_and_counts_bytes() -> None:
    measured = measure(Case(**TINY, fraction=0.5, link_mb_s=500.0))  # type: ignore[arg-type]
    case = measured.case
    assert all(measured.bitwise_equal.values())
    assert case.host_bytes == 2 * 12 * (2 * 4 * 8 * 2 * 16)
    assert measured.bytes_over_link[Way.STREAM] == measured.bytes_over_link[Way.COPY_FIRST] == case.host_bytes
    assert measured.bytes_over_link[Way.BESIDE] == case.host_bytes
    assert measured.bytes_over_link[Way.RESIDENT] == measured.bytes_over_link[Way.HYBRID] == 0
    assert measured.copy_s == pytest.approx(case.host_bytes / 500e6)
    assert len(measured.choices) == case.layers
    assert set(measured.step_s) == set(Way)


def select(case: Case, data: Data, share: float) -> Selected:
    """A selected step of its own, without a timing."""
    device, layers = HostDevice(), Layers(case, data)
    try:
        stream = device.create_stream("compute")
        streamer = Streamer(device, layers.planes[0], case.rules, depth=case.depth)
        selector = Selector(layers, streamer)
        launched = stream.launch(lambda: selector.step(share, stream))
        launched.wait()
        return selector.measured(
            Selection(data=data, share=share), 1.0, streamer.counts.bytes_streamed, launched.result()
        )
    finally:
        device.close(10.0)


def test_bench_of_selected_pages_moves_only_those_and_tells_the_error() -> None:
    measured = measure(Case(**TINY, fraction=0.5, link_mb_s=500.0, selected=(0.25, 1.0)))  # type: ignore[arg-type]
    case = measured.case
    found = {(row.selection.data, row.selection.share): row for row in measured.selected}
    assert set(found) == {(data, share) for data in Data for share in (0.25, 1.0)}
    for data in Data:
        some, all_pages = found[data, 0.25], found[data, 1.0]
        assert (some.pages, all_pages.pages) == (6, 25)
        assert 0 < some.bytes_over_link <= 2 * 5 * case.page_bytes, "the first page is on the host, the newest is not"
        assert some.bytes_over_link % case.page_bytes == 0
        assert all_pages.bytes_over_link == case.host_bytes
        assert some.relative_error > 0.01
        assert all_pages.relative_error == 0.0, "exact"
        assert 0.1 < some.weight_seen < all_pages.weight_seen == pytest.approx(1.0)


def test_bench_of_concentrated_keys_holds_its_weight_in_fewer_tokens_and_selects_with_less_error() -> None:
    case = Case(**{**TINY, "context": 2000, "head_dim": 64})  # type: ignore[arg-type]
    random, concentrated = (select(case, data, 0.25) for data in (Data.RANDOM, Data.CONCENTRATED))
    assert concentrated.relative_error < 0.7 * random.relative_error
    assert concentrated.weight_seen > 1.5 * random.weight_seen
    device = HostDevice()
    layers = [Layers(case, data) for data in Data]
    streamers = [Streamer(device, of.planes[0], case.rules, depth=2) for of in layers]
    most = [Selector(of, streamer).most() for of, streamer in zip(layers, streamers, strict=True)]
    device.close(10.0)
    assert most[1] < 0.7 * most[0] < 0.7


def test_bench_of_the_same_seed_has_the_same_data() -> None:
    first, again = (Layers(Case(**TINY), Data.CONCENTRATED) for _ in range(2))  # type: ignore[arg-type]
    assert torch.equal(first.queries, again.queries)
    assert all(map(torch.equal, first.planes[1], again.planes[1]))


def test_bench_of_few_pages_selects_the_first_and_the_newest_at_least() -> None:
    for tokens in (9, 16, 70):
        row = select(Case(**{**TINY, "context": tokens}), Data.CONCENTRATED, 0.01)  # type: ignore[arg-type]
        assert row.pages == 2
        assert (row.relative_error == 0.0) is (tokens <= 16)


def test_bench_as_json_has_the_headline_and_nothing_else_on_stdout(tmp_path: Path) -> None:
    picture = tmp_path / "ways.png"
    result = CliRunner().invoke(main, ["bench", "attention", *OPTIONS, "--json", "--plot", str(picture)])
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    ways, ideal = told["ways"], max(told["compute_s"], told["copy_s"])
    busy = max(ways["resident, link busy"]["step_s"], told["copy_s"])
    assert 0 <= told["headline"].pop("stalled_share") < 1
    assert told["headline"] == {
        "step_over_ideal_link_busy": pytest.approx(ways["stream"]["step_s"] / busy),
        "step_over_ideal": pytest.approx(ways["stream"]["step_s"] / ideal),
        "speedup_over_copy_then_attend": pytest.approx(ways["copy, then attend"]["step_s"] / ways["stream"]["step_s"]),
        "bitwise_equal": True,
    }
    assert picture.stat().st_size > 1000
    rows = told["selected"]
    assert [(row["data"], row["share"]) for row in rows] == [
        (data.value, share) for data in Data for share in Case().selected
    ]
    for row in rows:
        assert row["over_stream"] == pytest.approx(row["step_s"] / ways["stream"]["step_s"])
        assert row["bytes_over_link"] < ways["stream"]["bytes_over_link"]
        assert 0 < row["relative_error"] < 10
    assert set(told["tokens_with_90_percent_of_weight"]) == {data.value for data in Data}


def test_bench_as_text_names_the_choice() -> None:
    result = CliRunner().invoke(main, ["bench", "attention", *OPTIONS])
    assert result.exit_code == 0, result.stderr
    assert "The roofline's choice" in result.stdout
    assert "Pages selected by their key bounds" in result.stdout
    assert Data.CONCENTRATED.value in result.stdout


def test_bench_of_selected_shares_that_do_not_fit_is_refused() -> None:
    for share in (0.0, -0.1, 1.1):
        with pytest.raises(ProtocolError, match="must be above 0 and at most 1: shares of the pages"):
            Case(selected=(0.5, share))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0.0}, "fraction=0.0"),
        ({"heads": 3}, "heads=3 must be a multiple of kv_heads=2"),
        ({"layers": 0}, "layers=0"),
        ({"context": 8}, "of 1 pages leaves none in host memory"),
        ({"link_mb_s": -1.0}, "link_mb_s=-1.0"),
    ],
)
def test_bench_of_numbers_that_do_not_fit_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Case(**{**TINY, **options})  # type: ignore[arg-type]
    name, value = next(iter(options.items()))
    result = CliRunner().invoke(main, ["bench", "attention", *OPTIONS, f"--{name.replace('_', '-')}", str(value)])
    assert result.exit_code == 2
    assert message in result.stderr
