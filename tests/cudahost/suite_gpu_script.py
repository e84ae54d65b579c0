"""The parts of the GPU script that launch no kernels, on the driver whose memory is the host's: right, not fast."""

import pytest

from benchmarks.gpu import checks, copies, latency
from benchmarks.gpu.rows import Row
from benchmarks.gpu.run_all import run
from swapkv.streams.cuda_reaper import CudaOperation
from swapkv.streams.host import Work
from tests.cudahost.kernels import KernelDevice


@pytest.mark.parametrize("part", [checks.round_trips, checks.reuse_after_cancel, checks.every_call])
def test_check_passes(part: object) -> None:
    rows = list(run([part], KernelDevice))  # type: ignore[list-item]
    assert [row for row in rows if row.ok is False] == []
    assert any(row.ok for row in rows)


class LosingDevice(KernelDevice):
    """Copies towards the device are forgotten from the fifth on, and nobody is told."""

    def __init__(self) -> None:
        super().__init__()
        self._left = 5

    def execute(self, operation: CudaOperation) -> None:
        if operation.work is Work.SCATTER:
            self._left -= 1
            if self._left <= 0:
                operation.run = lambda: None
        super().execute(operation)


@pytest.mark.parametrize("part", [checks.round_trips, checks.reuse_after_cancel])
def test_lost_copies_are_seen(part: object) -> None:
    rows = list(part(LosingDevice))  # type: ignore[operator]
    assert not any(row.ok for row in rows)


def test_bandwidth_names_every_way_at_every_page_size() -> None:
    rows = list(copies.bandwidth(KernelDevice, moved_bytes=8 << 20))
    assert sum("ceiling" in row.what for row in rows) == 2
    for size in copies.PAGE_BYTES:
        assert sum(f"of {size >> 10} KiB, best" in row.what for row in rows) == 2
    assert all(isinstance(row.value, float) and row.value > 0 for row in rows)


def test_latency_is_measured_for_every_context() -> None:
    rows = list(latency.swaps(KernelDevice, contexts=(512, 1024), num_layers=2))
    assert len(rows) == 7


def test_part_that_raises_is_reported_and_the_others_go_on() -> None:
    def broken(make: object) -> list[Row]:
        raise ValueError("no such kernel")

    rows = list(run([broken, checks.every_call], KernelDevice))  # type: ignore[list-item]
    assert [row.ok for row in rows if row.ok is not None] == [False, True]
    assert "no such kernel" in rows[0].what
