"""The examples are what people copy: they run, on asyncio and trio, as they stand."""

import runpy
from pathlib import Path

import anyio
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_quickstart_runs_and_every_sequence_reaches_its_length(backend: str) -> None:
    main = runpy.run_path(str(EXAMPLES / "quickstart.py"))["main"]
    assert anyio.run(main, backend=backend) == {"a": 128, "b": 128, "c": 128}


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_stream_runs_both_sequences_on_too_few_pages(backend: str) -> None:
    main = runpy.run_path(str(EXAMPLES / "stream.py"))["main"]
    assert anyio.run(main, backend=backend) > 0
