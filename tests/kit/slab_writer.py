"""A process whose children write a slab until they are killed: `python -m tests.kit.slab_writer`.

It reads lines `path seed crash_at` and forks a child for each, because a fork needs no second start of Python. Children
report on standard output, a line for each thing that they begin or that is done; when one has ended its parent writes
`E`. A child with `crash_at` kills itself in the middle of that write; others are killed from outside.
"""

import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

from swapkv.errors import DiskTierFull
from swapkv.tiers.direct_io import DirectMode, OsIo
from swapkv.tiers.slab import Slab
from tests.kit.slab import FINGERPRINT, fetch, first, key_of, options_of, stamped, write_of

CHUNKS = 24
BLOCKS = 160
SIZES = (1, 4095, 4096, 20_000, 65_536)
IN_FLIGHT = 4
SECTOR_BYTES = 512


def say(*words: object) -> None:
    """One line, at once and in one piece: it is shorter than what a pipe takes as a whole."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class DyingIo(OsIo):
    """Kills its own process within write number `crash_at`, when a random part of the write is done."""

    def __init__(self, crash_at: int, rng: random.Random) -> None:
        self.crash_at, self.rng, self.writes = crash_at, rng, 0

    def pwrite(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.writes += 1
        if self.writes == self.crash_at:
            sectors = self.rng.randrange(sum(map(len, buffers)) // SECTOR_BYTES + 1)
            if sectors:
                super().pwrite(fd, first(buffers, sectors * SECTOR_BYTES), offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().pwrite(fd, buffers, offset)


def offload_for_ever(path: Path, seed: int, crash_at: int) -> None:
    """Write, overwrite, delete and read chunks at random, `IN_FLIGHT` at a time."""
    rng = random.Random(seed)
    options = options_of(BLOCKS, direct=rng.choice(list(DirectMode)))
    slab = Slab(path, fingerprint=FINGERPRINT, options=options, io=DyingIo(crash_at, rng))
    generations = {n: header.generation for n in range(CHUNKS) if (header := slab.lookup(key_of(n)))}
    newest = seed * 1_000_000
    flying: dict[Future[object], tuple[int, Callable[[], None]]] = {}
    while True:
        busy = {number for number, _ in flying.values()}
        number = rng.choice([n for n in range(CHUNKS) if n not in busy])
        if number in generations and rng.random() < 0.3:
            check(slab, number, generations[number])
        elif number in generations and rng.random() < 0.4:
            future, settle = delete(slab, number, generations)
            flying[future] = (number, settle)
        else:
            newest += 1
            begun = write(slab, number, newest, rng.choice(SIZES), generations)
            if begun is not None:
                flying[begun[0]] = (number, begun[1])
            elif not flying and generations:
                future, settle = delete(slab, next(iter(generations)), generations)
                future.result(20)
                settle()
        if len(flying) >= IN_FLIGHT:
            for future in wait(flying, 20, FIRST_COMPLETED).done:
                future.result()
                flying.pop(future)[1]()


def write(
    slab: Slab, number: int, generation: int, num_bytes: int, generations: dict[int, int]
) -> "tuple[Future[object], Callable[[], None]] | None":
    say("W", number, generation, num_bytes)
    try:
        future = slab.begin_write(write_of(number, generation, num_bytes))
    except DiskTierFull:
        return None

    def settle() -> None:
        generations[number] = generation
        say("C", number, generation)

    return future, settle  # type: ignore[return-value]


def delete(slab: Slab, number: int, generations: dict[int, int]) -> "tuple[Future[object], Callable[[], None]]":
    del generations[number]
    say("D", number)
    return slab.begin_delete(key_of(number)), lambda: say("G", number)  # type: ignore[return-value]


def check(slab: Slab, number: int, generation: int) -> None:
    back = fetch(slab, number, generation=generation)
    if back != stamped(number, generation, len(back)):
        say("X", number, generation)


def main() -> None:
    for line in sys.stdin:
        path, seed, crash_at = line.rsplit(maxsplit=2)
        child = os.fork()
        if child == 0:
            try:
                say("P", os.getpid())
                offload_for_ever(Path(path), int(seed), int(crash_at))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        say("E", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
