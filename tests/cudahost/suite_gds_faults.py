"""The GDS tier when disk or device fail, and the order that it keeps: typed, counted, and nothing is lost."""

import errno
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("kvikio") is None:
    pytest.skip("kvikio is not installed: `make test` does that", allow_module_level=True)

from tests.cudahost import gds_driver  # before kvikio is loaded

# isort: split
import kvikio

from swapkv.errors import (
    ChunkNotStored,
    DiskFault,
    DiskNoSpace,
    DiskShort,
    DiskVanished,
    DrainTimeout,
    TransferError,
)
from swapkv.tiers.gds import GdsSlab
from swapkv.tiers.gds_kvikio import KvikioFile, fault_of
from swapkv.tiers.gds_types import DeviceRead, DeviceWrite
from swapkv.tiers.slab_file import SyncPolicy
from swapkv.tiers.slab_header import BLOCK_BYTES
from tests.cudahost import control, gds_scene
from tests.cudahost.gds_scene import (
    BLOCKS,
    DIRECT,
    NUM_BYTES,
    SOON_NS,
    WAYS,
    Way,
    begin_write,
    checksum_of,
    memory_of,
    name_of,
    opened,
    read_back,
    small,
    wait_until,
)
from tests.cudahost.kernels import KernelDevice
from tests.kit.slab import fetch, key_of, stamped

BOUNCED = WAYS[2]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with gds_scene.clean():
        yield


@pytest.fixture
def device() -> Iterator[KernelDevice]:
    with gds_scene.kernel_device() as device:
        yield device


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slab"


@pytest.fixture(params=WAYS, ids=name_of)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=DIRECT, ids=name_of)
def direct(request: pytest.FixtureRequest) -> Way:
    return request.param  # type: ignore[no-any-return]


def point_at(tier: GdsSlab, path: str, flags: str) -> None:
    """From now on kvikio's file is another."""
    assert isinstance(tier.file, KvikioFile)
    with kvikio.defaults.set({"compat_mode": kvikio.CompatMode.ON}):
        tier.file._file = kvikio.CuFile(path, flags)


@pytest.mark.parametrize(
    ("code", "kind", "error"),
    [
        (errno.ENOSPC, "ENOSPC", DiskNoSpace),
        (errno.EIO, "EIO", DiskFault),
        (errno.ENODEV, "ENODEV", DiskVanished),
        (gds_driver.OWN_ERROR, "cufile", DiskFault),
    ],
)
def test_request_that_cufile_fails_is_typed_and_loses_nothing(
    path: Path, device: KernelDevice, direct: Way, code: int, kind: str, error: type[DiskFault]
) -> None:
    with opened(path, device, direct) as tier:
        begin_write(tier, device, 1, 1, NUM_BYTES).result(20)
        used_bytes = tier.usage().used_bytes
        gds_driver.fail(1, code)
        with pytest.raises(error) as raised:
            begin_write(tier, device, 1, 2, NUM_BYTES).result(20)
        assert raised.value.kind == kind
        assert dict(tier.usage().failures) == {kind: 1}
        assert tier.usage().used_bytes == used_bytes
        assert read_back(tier, device, 1, NUM_BYTES) == stamped(1, 1, NUM_BYTES)
        gds_driver.fail(1, code)
        with pytest.raises(DiskFault):
            read_back(tier, device, 1, NUM_BYTES)
        begin_write(tier, device, 1, 3, NUM_BYTES).result(20)
        assert fetch(tier.slab, 1) == stamped(1, 3, NUM_BYTES)
        tier.begin_delete(key_of(1)).result(20)
        assert tier.usage().used_bytes == 0
        del raised


def test_disk_that_is_full_and_one_that_fails_are_typed_when_bounced(path: Path, device: KernelDevice) -> None:
    with opened(path, device, BOUNCED) as tier:
        begin_write(tier, device, 1, 1, NUM_BYTES).result(20)
        point_at(tier, "/dev/full", "r+")
        with pytest.raises(DiskNoSpace):
            begin_write(tier, device, 1, 2, NUM_BYTES).result(20)
        point_at(tier, "/proc/self/mem", "r")
        with pytest.raises(DiskFault) as raised:
            read_back(tier, device, 1, NUM_BYTES)
        assert raised.value.kind == "EIO"
        del raised
        assert dict(tier.usage().failures) == {"ENOSPC": 1, "EIO": 1}
        assert fetch(tier.slab, 1) == stamped(1, 1, NUM_BYTES)


def test_requests_that_are_cut_short_go_on_where_they_were(path: Path, device: KernelDevice, direct: Way) -> None:
    with opened(path, device, direct) as tier:
        for most, requests in ((BLOCK_BYTES, 5), (BLOCK_BYTES + 700, 5), (4 * BLOCK_BYTES, 2)):
            gds_driver.shorten(most)
            before = gds_driver.requests()
            begin_write(tier, device, 1, most, 5 * BLOCK_BYTES).result(20)
            assert gds_driver.requests() - before == requests
            assert read_back(tier, device, 1, 5 * BLOCK_BYTES) == stamped(1, most, 5 * BLOCK_BYTES)
        gds_driver.shorten(100)
        with pytest.raises(DiskShort, match="0 of 20480 bytes, then no more"):
            begin_write(tier, device, 1, 1 << 20, 5 * BLOCK_BYTES).result(20)


def test_file_that_was_cut_gives_a_short_read_and_the_other_chunks_stay(
    path: Path, device: KernelDevice, way: Way
) -> None:
    with opened(path, device, way) as tier:
        for number in (1, 2):
            header = begin_write(tier, device, number, 1, 4 * BLOCK_BYTES).result(20)
        os.truncate(path, header.payload_offset + BLOCK_BYTES)
        with pytest.raises(DiskShort):
            read_back(tier, device, 2, 4 * BLOCK_BYTES)
        assert tier.usage().failures["short"] == 1
        assert read_back(tier, device, 1, 4 * BLOCK_BYTES) == stamped(1, 1, 4 * BLOCK_BYTES)
        os.truncate(path, BLOCKS * BLOCK_BYTES)


def test_file_that_was_deleted_takes_no_more_chunks(path: Path, device: KernelDevice, way: Way) -> None:
    with opened(path, device, way) as tier:
        path.unlink()
        with pytest.raises(DiskVanished, match="was deleted: open a new slab"):
            begin_write(tier, device, 1, 1, NUM_BYTES).result(20)
        assert tier.usage().used_bytes == 0


@pytest.mark.parametrize("function", ["cuMemcpyBatchAsync_v2", "cuStreamSynchronize"])
def test_call_of_the_driver_that_fails_stores_nothing_whichever_it_is(
    path: Path, device: KernelDevice, function: str
) -> None:
    """The first, second, third, … one, until none is left to fail."""
    with opened(path, device, BOUNCED) as tier:
        begin_write(tier, device, 1, 1, NUM_BYTES).result(20)
        used_bytes = tier.usage().used_bytes
        failed = 0
        for nth in range(1, 20):
            control.fail(function, nth, control.NOT_SUPPORTED)
            try:
                begin_write(tier, device, 1, 2, NUM_BYTES).result(20)
            except TransferError:
                failed += 1
                assert tier.usage().used_bytes == used_bytes
                assert fetch(tier.slab, 1) == stamped(1, 1, NUM_BYTES)
            else:
                break
            finally:
                control.forget_failures()
        assert 0 < failed < 18
        assert fetch(tier.slab, 1) == stamped(1, 2, NUM_BYTES)


def test_copies_of_a_transfer_that_failed_are_over_before_its_memory_is_let_go_of(
    path: Path, device: KernelDevice
) -> None:
    control.timing(1, 20_000)
    with opened(path, device, BOUNCED, small(depth=1)) as tier:
        for generation in range(1, 9):
            control.fail("cuMemcpyBatchAsync_v2", 1, control.NOT_SUPPORTED)
            transfer = begin_write(tier, device, 1, generation, 100_000)
            assert isinstance(transfer.exception(20), TransferError)
            (copies,) = (stream for stream in device._streams if stream.name.startswith("gds-copies"))
            assert copies.record().query()
        del transfer


def test_words_of_kvikio_become_kinds() -> None:
    for words, kind in (
        ("POSIX error on pwrite: No space left on device", "ENOSPC"),
        ("POSIX error on pread: EOF", "short"),
        ("cuFile error at: x.cpp:1: Input/output error", "EIO"),
        ("cuFile error at: x.cpp:1: internal error", "cufile"),
        ("cuFile error at: x.cpp:1: Operation not permitted", "unknown"),
    ):
        fault = fault_of(RuntimeError(words), "reading")
        assert isinstance(fault, DiskFault)
        assert fault.kind == kind
    assert not isinstance(fault_of(RuntimeError("CUDA error at: x.cpp:1: CUDA_ERROR_UNKNOWN(…)"), ""), DiskFault)


def test_batch_has_an_outcome_for_each_item(path: Path, device: KernelDevice, direct: Way) -> None:
    with opened(path, device, direct, small(depth=1)) as tier:
        writes = [
            DeviceWrite(key=key_of(n), generation=1, memory=memory_of(device, stamped(n, 1, NUM_BYTES)))
            for n in range(4)
        ]
        gds_driver.fail(2, errno.EIO)
        outcomes = tier.write_batch(writes, deadline_ns=20_000_000_000)
        assert [type(outcome.error) for outcome in outcomes] == [type(None), DiskFault, type(None), type(None)]
        into = [device.allocate(NUM_BYTES) for _ in range(4)]
        reads = [DeviceRead(key=key_of(n), into=into[n]) for n in range(4)]
        outcomes = tier.read_batch(reads, deadline_ns=20_000_000_000)
        assert [type(outcome.error) for outcome in outcomes] == [type(None), ChunkNotStored, type(None), type(None)]
        assert all(into[n].numpy().tobytes() == stamped(n, 1, NUM_BYTES) for n in (0, 2, 3))
        with gds_driver.holding():
            outcomes = tier.read_batch(reads[:1] + reads[2:], deadline_ns=SOON_NS)
            assert [type(outcome.error) for outcome in outcomes] == [DrainTimeout] * 3
        wait_until(lambda: tier._threads._pending == 0)
        del writes, into, reads, outcomes


def test_write_comes_after_what_fills_its_memory(path: Path, device: KernelDevice, way: Way) -> None:
    with opened(path, device, way) as tier:
        stream = device.create_stream("forward")
        for generation, checksum in ((1, None), (2, checksum_of(1, 2))):
            memory = memory_of(device, bytes(NUM_BYTES))
            filled = memory_of(device, stamped(1, generation, NUM_BYTES))
            gate = device.create_promise()
            stream.wait(gate)
            event = stream.launch(lambda memory=memory, filled=filled: memory.copy_(filled))
            transfer = tier.begin_write(
                DeviceWrite(key=key_of(1), generation=generation, memory=memory, checksum=checksum, after=event)
            )
            for number in (2, 3, 4):  # while these go, it could
                begin_write(tier, device, number, generation, NUM_BYTES).result(20)
            assert not transfer.done()
            gate.set()
            transfer.result(20)
            assert fetch(tier.slab, 1) == stamped(1, generation, NUM_BYTES)
        del memory, filled, event, transfer


def test_read_comes_after_who_uses_its_memory(path: Path, device: KernelDevice, way: Way) -> None:
    with opened(path, device, way) as tier:
        begin_write(tier, device, 1, 1, NUM_BYTES).result(20)
        stream, gate = device.create_stream("forward"), device.create_promise()
        memory = device.allocate(NUM_BYTES)
        stream.wait(gate)
        event = stream.launch(lambda used=memory: used.numpy().tobytes())
        transfer = tier.begin_read(DeviceRead(key=key_of(1), into=memory, after=event))
        gate.set()
        transfer.result(20)
        assert event.result() == bytes(NUM_BYTES)
        assert memory.numpy().tobytes() == stamped(1, 1, NUM_BYTES)
        del memory, event


def test_write_after_an_event_that_fails_stores_nothing(path: Path, device: KernelDevice, way: Way) -> None:
    with opened(path, device, way) as tier:
        for checksum in (None, checksum_of(1, 1)):
            gate = device.create_promise()
            transfer = begin_write(tier, device, 1, 1, NUM_BYTES, after=gate, checksum=checksum)
            gate.set(TransferError("the forward failed"))
            with pytest.raises(TransferError, match="the forward failed"):
                transfer.result(20)
            assert tier.usage().used_bytes == 0
        begin_write(tier, device, 1, 1, NUM_BYTES).result(20)
        assert fetch(tier.slab, 1) == stamped(1, 1, NUM_BYTES)


def test_durable_slab_syncs_what_came_from_the_device(path: Path, device: KernelDevice, way: Way) -> None:
    with opened(path, device, way, sync=SyncPolicy.DATA) as tier:
        begin_write(tier, device, 1, 1, NUM_BYTES).result(20)
        assert fetch(tier.slab, 1) == stamped(1, 1, NUM_BYTES)
