"""The demo with a real language model: English in, English out, equal to its twin."""

import json
from collections.abc import Iterator

import pytest
import torch
from click.testing import CliRunner

from swapkv.cli import main


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The command sets the number of torch's threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.model
def test_demo_of_gemma_is_equal_and_can_be_read() -> None:
    small = ["--gpu-slots", "2", "--requests", "4", "--new-tokens", "24", "--quantum", "8", "--no-compare"]
    result = CliRunner().invoke(main, ["demo", "--model", "gemma3-270m", *small, "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["headline"]["tokens_equal"], report["headline"]["bytes_equal"]) == (True, True)
    assert report["headline"]["recomputed_tokens"] == 0
    assert report["headline"]["preemptions"] >= 4
    assert report["model"] == "gemma3-270m"
    texts = [request["text"] for request in report["requests"]]
    assert "capital" in texts[0]
    assert all(len(text.split()) >= 8 and text.isprintable() for text in (t.replace("\n", " ") for t in texts))
