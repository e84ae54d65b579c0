"""`swapkv bench attention`: every way gives the same bits, and what is printed is what was measured."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from swapkv import ProtocolError
from swapkv.bench.attention import Case, Way, measure
from swapkv.cli import main

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


def test_bench_as_text_names_the_choice() -> None:
    result = CliRunner().invoke(main, ["bench", "attention", *OPTIONS])
    assert result.exit_code == 0, result.stderr
    assert "The roofline's choice" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0.0}, "fraction=0.0"),
        ({"heads": 3}, "heads=3 must be a multiple of kv_heads=2"),
        ({"layers": 0}, "layers=0"),
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
