"""The command: what it prints where, what it writes, and how it ends."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner, Result

import swapkv.cli
from swapkv.cli import main
from swapkv.observe.records import Recorder
from swapkv.streams.host import HostDevice, Operation, Work

SMALL = ("--gpu-slots", "2", "--requests", "3", "--new-tokens", "8", "--quantum", "3", "--link-mb-s", "100")
HEADLINE = [
    "tokens_equal",
    "bytes_equal",
    "recomputed_tokens",
    "preemptions",
    "tokens_per_s",
    "ceiling_tokens_per_s",
    "stop_the_world_tokens_per_s",
    "recompute_tokens_per_s",
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The command sets the number of torch's threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def demo(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["demo", *SMALL, *arguments])


def test_demo_json_is_one_object_and_nothing_else_on_standard_output() -> None:
    command = "from swapkv.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "demo", *SMALL, "--json", "--repeats", "1"], capture_output=True, text=True
    )
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0
    assert list(report["headline"]) == HEADLINE
    assert all(value is True or value > 0 for name, value in report["headline"].items() if name != "recomputed_tokens")
    assert (report["headline"]["recomputed_tokens"], report["headline"]["preemptions"] > 0) == (0, True)
    assert [line.split(":")[0] for line in done.stderr.splitlines() if "timed run" in line] == ["swapkv"] * 4


def test_demo_text_is_on_standard_output_and_the_progress_on_standard_error() -> None:
    result = demo("--no-compare")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "EXACT: tokens equal, KV bytes equal, 0 tokens recomputed"
    assert "random weights" in result.stdout
    assert "The capital of France is" in result.stdout
    assert "How fast" not in result.stdout
    assert "3 FINISHED" in result.stderr
    assert "swapkv: the twin" in result.stderr


def test_demo_compared_text_names_every_way() -> None:
    result = demo("--repeats", "1")
    assert result.exit_code == 0
    for words in ("swapping", "stop the world", "recomputing", "ceiling", "of ceiling", "only 2 requests on 2 slots"):
        assert words in result.stdout


def test_demo_options_change_the_run() -> None:
    plain = json.loads(demo("--no-compare", "--json").stdout)
    seeded = json.loads(demo("--no-compare", "--json", "--seed", "7").stdout)
    prompted = json.loads(demo("--no-compare", "--json", "--prompt", "Hi", "--victims", "score").stdout)
    assert len({report["requests"][0]["text"] for report in (plain, seeded, prompted)}) == 3
    assert prompted["scenario"]["victims"] == "score"
    assert len({request["text"] for request in prompted["requests"]}) == 1


def test_demo_trace_and_plot_are_written(tmp_path: Path) -> None:
    trace, plot = tmp_path / "t.json", tmp_path / "p.svg"
    result = demo("--no-compare", "--trace", str(trace), "--plot", str(plot))
    assert result.exit_code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "i", "M"}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "requests",
        "links",
        "compute",
        "chunks",
    }
    assert ElementTree.parse(plot).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "3 requests on 2 GPU slots" in plot.read_text()
    assert f"swapkv: wrote {trace}, to be opened in https://ui.perfetto.dev" in result.stderr


def test_demo_plot_as_png_is_one(tmp_path: Path) -> None:
    plot = tmp_path / "p.png"
    assert demo("--no-compare", "--plot", str(plot)).exit_code == 0
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu-slots", "0"], ["--gpu-slots 0 ", "without a slot nothing can run"]),
        (["--gpu-slots", "-2"], ["--gpu-slots -2 "]),
        (["--gpu-slots", "4"], ["--gpu-slots 4 ", "--requests 3", "take at most 3 slots, or more requests"]),
        (["--requests", "0"], ["--requests 0 ", "nothing to run"]),
        (["--new-tokens", "0"], ["--new-tokens 0 ", "nothing to generate"]),
        (["--quantum", "0"], ["--quantum 0 ", "at least one token"]),
        (["--page-size", "0"], ["--page-size 0 ", "at least one token"]),
        (["--slot-tokens", "9"], ["--slot-tokens 9 ", "too small", "give a slot as many, or lower --new-tokens"]),
        (["--host-slots", "-1"], ["--host-slots -1 "]),
        (["--link-mb-s", "0"], ["--link-mb-s 0.0 ", "a link without bandwidth moves nothing"]),
        (["--link-mb-s", "-4"], ["--link-mb-s -4.0 "]),
        (["--link-mb-s", "nan"], ["--link-mb-s nan "]),
        (["--link-mb-s", "inf"], ["--link-mb-s inf "]),
        (["--restore-mb-s", "0"], ["--restore-mb-s 0.0 ", "nothing is ever restored"]),
        (["--seed", "-1"], ["--seed -1 "]),
        (["--repeats", "0"], ["--repeats 0 ", "say --no-compare"]),
        (["--plot", "x.txt"], ["x.txt", "'.txt'", "x.png or x.svg"]),
        (
            ["--plot", "/nowhere/x.png"],
            ["--plot /nowhere/x.png", "No such file", "name a file in a writable directory"],
        ),
        (["--trace", "/nowhere/t.json"], ["--trace /nowhere/t.json", "No such file", "in a writable directory"]),
        (["--trace", "/etc/passwd/t.json"], ["--trace /etc/passwd/t.json", "Not a directory"]),
        (["--trace", "/"], ["--trace / is a directory: name a file in it"]),
    ],
)
def test_demo_bad_input_ends_with_two_and_one_clear_line(arguments: list[str], words: list[str]) -> None:
    result = demo(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("swapkv: ")
    for word in words:
        assert word in line


class Corrupting(HostDevice):
    """A device that flips a bit of KV after a restore has copied and verified it."""

    def execute(self, operation: Operation) -> None:
        super().execute(operation)
        if operation.work is Work.SCATTER:
            block = operation.blocks[0]
            block.regions[0].pages[block.pages[0], 0] ^= 1


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_demo_mismatch_ends_with_one(monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]) -> None:
    monkeypatch.setattr("swapkv.demo.run.HostDevice", Corrupting)
    result = demo("--no-compare", *form)
    assert result.exit_code == 1
    if form:
        assert json.loads(result.stdout)["headline"]["bytes_equal"] is False
    else:
        assert result.stdout.splitlines()[-1].startswith("NOT EXACT: ")


def test_demo_interrupted_says_so_and_is_no_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(swapkv.cli, "_workload", interrupt)
    result = demo()
    assert (result.exit_code, result.stderr) == (130, "swapkv: interrupted\n")


def test_demo_output_that_fails_after_the_run_keeps_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(records: Recorder, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(swapkv.cli, "write_trace", fail)
    result = demo("--no-compare", "--trace", str(tmp_path / "t.json"))
    assert result.exit_code == 2
    assert "EXACT: " in result.stdout
    assert "No space left on device" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "missing", "modules", "remedy"),
    [
        (
            ["--model", "gemma3-270m"],
            "transformers",
            ["swapkv.demo.gemma", "swapkv.integrations.transformers"],
            "swapkv[transformers]",
        ),
        (["--plot", "p.png"], "matplotlib", ["swapkv.observe.timeline"], "swapkv[plot]"),
    ],
)
def test_demo_missing_extra_is_named_before_the_run(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], missing: str, modules: list[str], remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    for module in modules:
        monkeypatch.delitem(sys.modules, module, raising=False)
    result = demo(*arguments)
    assert result.exit_code == 2
    assert f"pip install '{remedy}'" in result.stderr.splitlines()[-1]
    assert "FINISHED" not in result.stderr


def test_demo_text_that_the_output_cannot_encode_is_replaced() -> None:
    result = CliRunner(charset="ascii").invoke(main, ["demo", *SMALL, "--no-compare", "--prompt", "Zürich …"])
    assert result.exit_code == 0
    assert "Z?rich" in result.stdout


def test_version_and_help_say_what_this_is() -> None:
    assert version("swapkv") in CliRunner().invoke(main, ["--version"]).stdout
    assert "demo" in CliRunner().invoke(main, ["--help"]).stdout
    text = CliRunner().invoke(main, ["demo", "--help"]).stdout
    assert all(f"--{option}" in text for option in ("gpu-slots", "json", "trace", "plot", "no-compare", "repeats"))
