"""The parts of the GPU script that launch no kernels, on the driver whose memory is the host's: right, not fast."""

import pytest

from benchmarks.gpu import checks, copies, latency, offloaded, streaming
from benchmarks.gpu.rows import MakeDevice, Row
from benchmarks.gpu.run_all import run
from swapkv.streams.cuda import CudaDevice
from swapkv.streams.cuda_copies import Way
from swapkv.streams.cuda_reaper import CudaOperation
from swapkv.streams.host import Work
from tests.cudahost.control import view_on_host
from tests.cudahost.kernels import KernelDevice


@pytest.mark.parametrize("part", [checks.round_trips, checks.reuse_after_cancel, checks.every_call])
def test_check_passes(part: object) -> None:
    rows = list(run([part], KernelDevice))  # type: ignore[list-item]
    assert [row for row in rows if row.ok is False] == []
    assert any(row.ok for row in rows)


def test_every_way_is_checked() -> None:
    rows = list(checks.every_way(lambda: KernelDevice(way=None)))
    assert [row.ok for row in rows] == [True] * len(Way)
    assert all(any(row.what.startswith(way.value) for row in rows) for way in Way)


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


def test_lost_copies_are_seen_in_every_way() -> None:
    rows = [row for row in checks.every_way(LosingDevice) if row.ok is not None]
    assert rows
    assert not any(row.ok for row in rows)


@pytest.mark.parametrize("part", [checks.round_trips, checks.reuse_after_cancel])
def test_lost_copies_are_seen(part: object) -> None:
    rows = list(part(LosingDevice))  # type: ignore[operator]
    assert not any(row.ok for row in rows)


def test_bandwidth_names_every_way_at_every_page_size() -> None:
    rows = list(copies.bandwidth(lambda: KernelDevice(way=None), moved_bytes=4 << 20))
    assert sum("ceiling" in row.what for row in rows) == 2
    for size in copies.PAGE_BYTES:
        for what in ("best", "batch", "single", "staged", "kernel", "what the probe chose"):
            assert sum(f"of {size >> 10} KiB, {what}" in row.what for row in rows) == 2
    for size in copies.GAP_PAGE_BYTES:
        assert sum(f"every other {size >> 10} KiB, {way.value}" in row.what for row in rows for way in Way) == 10
    assert all(isinstance(row.value, float) and row.value > 0 for row in rows)


def test_way_that_is_missing_is_named_with_its_reason() -> None:
    rows = list(copies.bandwidth(KernelDevice, moved_bytes=4 << 20))
    assert [row.what for row in rows if row.value == "missing"] == ["kernel: its kernel was not asked for"]


def test_streamed_attention_has_the_bits_of_resident_kv() -> None:
    case = streaming.Case(
        context=640, host_tokens=512, layers=3, heads=4, kv_heads=2, head_dim=16, split_tokens=64, depth=2
    )
    rows = list(streaming.streamed_attention(KernelDevice, case))
    assert [row.ok for row in rows if row.ok is not None] == [True, True]
    assert len(rows) == 7


def test_streamed_attention_over_lost_copies_is_seen() -> None:
    case = streaming.Case(context=640, host_tokens=512, layers=3, heads=4, kv_heads=2, head_dim=16, split_tokens=64)
    rows = list(streaming.streamed_attention(LosingDevice, case))
    assert [row.ok for row in rows if row.ok is not None] == [False, False]


def device_as_on_a_gpu() -> CudaDevice:
    """Streams of the production code, which run no Python."""
    return CudaDevice(way=Way.BATCH, view=view_on_host)


@pytest.mark.parametrize(("make", "found"), [(KernelDevice, "works"), (device_as_on_a_gpu, "refused")])
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_caches_of_transformers_are_measured_as_far_as_they_go(make: MakeDevice, found: str) -> None:
    case = offloaded.Case(layers=2, heads=2, head_dim=16, context=512, tokens=3)
    rows = list(offloaded.offloaded_cache(make, case))
    assert [row.value for row in rows if isinstance(row.value, str)] == ["skipped", found]
    assert sum(isinstance(row.value, float) and row.value > 0 for row in rows) == 3


def test_missing_transformers_is_a_row_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded, "find_spec", lambda name: None)
    (row,) = offloaded.offloaded_cache(KernelDevice)
    assert row.value == "skipped"
    assert "pip install" in row.what


def test_latency_is_measured_for_every_context() -> None:
    rows = list(latency.swaps(KernelDevice, contexts=(512, 1024), num_layers=2))
    assert len(rows) == 7


def test_part_that_raises_is_reported_and_the_others_go_on() -> None:
    def broken(make: object) -> list[Row]:
        raise ValueError("no such kernel")

    rows = list(run([broken, checks.every_call], KernelDevice))  # type: ignore[list-item]
    assert [row.ok for row in rows if row.ok is not None] == [False, True]
    assert "no such kernel" in rows[0].what
