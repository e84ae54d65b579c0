"""kill -9 of a real process that offloads: what it reported committed is there, and nothing else is taken for a chunk."""

import os
import random
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swapkv.tiers.slab_header import BLOCK_BYTES
from tests.kit.slab import Ledger, opened, options_of
from tests.kit.slab_writer import BLOCKS

ROOT = Path(__file__).parent.parent
DELAY_S_MAX = 0.004
LINES_MAX = 120
WRITES_MAX = 150


class Writer:
    """The process that forks writers, and what its lines say."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.ledger = Ledger()
        self.committed = 0
        self.discarded: Counter[str] = Counter()

    def start(self, path: Path, seed: int, crash_at: int) -> int:
        """The process id of a new child."""
        assert self.process.stdin
        self.process.stdin.write(f"{path} {seed} {crash_at}\n")
        self.process.stdin.flush()
        what, child = self.line()
        assert what == "P", "a child says who it is before anything else"
        return int(child)

    def line(self) -> list[str]:
        assert self.process.stdout
        words = self.process.stdout.readline().split()
        assert words, "the writers' parent died"
        return words

    def note(self, words: list[str]) -> None:
        what, *numbers = words[0], *map(int, words[1:])
        if what == "W":
            self.ledger.begin_write(numbers[0], numbers[1], numbers[2])
        elif what == "C":
            self.ledger.settle(numbers[0], numbers[1])
            self.committed += 1
        elif what == "D":
            self.ledger.begin_delete(numbers[0])
        elif what == "G":
            self.ledger.settle(numbers[0], None)
        else:
            raise AssertionError(f"a writer says {words}")

    def read_until_end(self, limit: int) -> int | None:
        """Note up to `limit` lines; the child's exit code if it ended."""
        for _ in range(limit):
            words = self.line()
            if words[0] == "E":
                return int(words[1])
            self.note(words)
        return None


@contextmanager
def writers() -> Iterator[Writer]:
    command = [sys.executable, "-m", "tests.kit.slab_writer"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Writer(process)
        assert process.stdin
        process.stdin.close()
        assert process.wait(20) == 0


def kills(path: Path, seed: int, count: int) -> None:
    """Kill a writer of the same slab `count` times, every second one by itself within a write, and look each time."""
    rng = random.Random(seed)
    with writers() as writer:
        for number in range(count):
            within_a_write = number % 2 == 1
            child = writer.start(path, number + 1, rng.randint(1, WRITES_MAX) if within_a_write else -1)
            code = writer.read_until_end(sys.maxsize if within_a_write else rng.randint(0, LINES_MAX))
            if code is None:
                select.select([], [], [], rng.uniform(0, DELAY_S_MAX))
                os.kill(child, signal.SIGKILL)
                code = writer.read_until_end(sys.maxsize)
            assert code == -signal.SIGKILL
            with opened(path, options_of(BLOCKS)) as slab:
                writer.ledger.verify(slab)
                writer.discarded.update(slab.usage().discarded)
        assert writer.committed > count, "the writers got somewhere between the kills"
        assert writer.discarded["checksum"] > 0, "some were killed within a header"
        with opened(path, options_of(BLOCKS)) as slab:
            for header in slab.chunks():
                slab.begin_delete(header.key).result(20)
            assert slab.usage().largest_free_bytes == (BLOCKS - 1) * BLOCK_BYTES


def test_killed_process_loses_nothing_that_it_reported_committed(tmp_path: Path) -> None:
    kills(tmp_path / "killed.slab", seed=1, count=40)


@pytest.mark.long
def test_process_killed_hundreds_of_times_loses_nothing(tmp_path: Path) -> None:
    kills(tmp_path / "killed.slab", seed=2, count=400)
