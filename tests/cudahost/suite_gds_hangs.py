"""The GDS tier when the disk hangs, and its end: nobody waits for ever, and nothing is reused that is still in use."""

import importlib.util
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

if importlib.util.find_spec("kvikio") is None:
    pytest.skip("kvikio is not installed: `make test` does that", allow_module_level=True)

from tests.cudahost import gds_driver  # before kvikio is loaded

# isort: split

from swapkv.errors import (
    DrainTimeout,
    PoolClosed,
    ProtocolError,
    SlabInUse,
    WouldBlock,
)
from swapkv.tiers.gds import GdsSlab
from swapkv.tiers.gds_kvikio import KvikioFile
from swapkv.tiers.gds_threads import Item
from swapkv.tiers.gds_types import DeviceRead, EndUnknown, Transfer
from swapkv.tiers.slab import Slab
from swapkv.tiers.slab_header import BLOCK_BYTES
from tests.cudahost import control, gds_scene
from tests.cudahost.gds_scene import (
    BLOCKS,
    DIRECT,
    NUM_BYTES,
    WAYS,
    Way,
    begin_write,
    checksum_of,
    name_of,
    opened,
    small,
    soon,
    wait_until,
)
from tests.cudahost.kernels import LONG_S, KernelDevice
from tests.kit.slab import FINGERPRINT, fetch, key_of, options_of, stamped

KEPT: list[object] = []
"""Devices whose memory must stay: requests of unknown end may touch it."""


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


def hang(tier: GdsSlab, device: KernelDevice, number: int, generation: int = 1) -> Transfer:
    """A write that is in the hands of the disk, which holds it, and whose deadline has passed."""
    late = begin_write(tier, device, number, generation, NUM_BYTES, checksum=checksum_of(number, generation))
    gds_driver.wait_held()
    with pytest.raises(DrainTimeout, match="its memory is in use until the transfer is released"):
        late.result(20)
    return late


def test_write_that_hangs_ends_typed_and_gives_nothing_back_before_its_end(
    path: Path, device: KernelDevice, direct: Way
) -> None:
    with opened(path, device, direct) as tier:
        device_memory = control.live(0)
        with soon(tier), gds_driver.holding():
            late = hang(tier, device, 1)
            control.collect()
            assert control.live(0) == device_memory + 1, "the tier refers to the memory that the disk reads"
            assert not late.released.done()
            assert tier.usage().used_bytes == 5 * BLOCK_BYTES
            other = tier.slab.reserve(key_of(2), 1, BLOCK_BYTES)
            assert other.offset >= 6 * BLOCK_BYTES, "nobody gets the extent"
            tier.slab.abandon(other)
            with pytest.raises(ProtocolError, match=r"a write or delete of .* is under way"):
                begin_write(tier, device, 1, 2, NUM_BYTES)
        late.released.result(20)
        assert tier.usage().used_bytes == 0
        assert tier.lookup(key_of(1)) is None, "what came too late is not stored"
        begin_write(tier, device, 1, 1, NUM_BYTES).result(20)
        assert fetch(tier.slab, 1) == stamped(1, 1, NUM_BYTES)
        control.collect()
        assert control.live(0) == device_memory


def test_without_the_look_at_the_time_a_late_write_would_be_stored(
    path: Path, device: KernelDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard of the test above, taken out."""
    monkeypatch.setattr(Item, "require_time", lambda _: None)
    with opened(path, device, DIRECT[0]) as tier:
        with soon(tier), gds_driver.holding():
            late = hang(tier, device, 1)
        late.released.result(20)
        assert tier.lookup(key_of(1)) is not None


def test_read_that_hangs_ends_typed_and_its_extent_stays_until_its_end(
    path: Path, device: KernelDevice, direct: Way
) -> None:
    with opened(path, device, direct) as tier:
        begin_write(tier, device, 1, 1, NUM_BYTES).result(20)
        used_bytes = tier.usage().used_bytes
        into = device.allocate(NUM_BYTES)
        with soon(tier), gds_driver.holding():
            late = tier.begin_read(DeviceRead(key=key_of(1), into=into))
            gds_driver.wait_held()
            del into
            with pytest.raises(DrainTimeout, match="under way and going on"):
                late.result(20)
            with pytest.raises(DrainTimeout, match="is still read"):
                tier.begin_delete(key_of(1)).result(20)
            assert tier.usage().used_bytes == used_bytes
            assert fetch(tier.slab, 1) == stamped(1, 1, NUM_BYTES), "who reads by the slab is not held up"
        late.released.result(20)
        tier.begin_delete(key_of(1)).result(20)
        assert tier.usage().used_bytes == 0


def test_items_behind_threads_that_all_hang_end_at_their_deadline_and_give_all_back_at_once(
    path: Path, device: KernelDevice, direct: Way
) -> None:
    with opened(path, device, direct, small(depth=1)) as tier, soon(tier), gds_driver.holding():
        late = begin_write(tier, device, 1, 1, NUM_BYTES)
        gds_driver.wait_held()
        behind = [begin_write(tier, device, number, 1, NUM_BYTES) for number in (2, 3)]
        for transfer in behind:
            with pytest.raises(DrainTimeout, match="had not begun, and nothing has changed: try again"):
                transfer.result(20)
            transfer.released.result(20)
        assert late.done()
        assert tier.usage().used_bytes == 5 * BLOCK_BYTES


def test_transfer_that_is_cancelled_before_it_begins_changes_nothing(
    path: Path, device: KernelDevice, direct: Way
) -> None:
    with opened(path, device, direct, small(depth=1)) as tier:
        begin_write(tier, device, 9, 1, NUM_BYTES).result(20)
        used_bytes = tier.usage().used_bytes
        with gds_driver.holding():
            first = begin_write(tier, device, 1, 1, NUM_BYTES)
            gds_driver.wait_held()
            second = begin_write(tier, device, 2, 1, NUM_BYTES)
            into = device.allocate(NUM_BYTES)
            third = tier.begin_read(DeviceRead(key=key_of(9), into=into))
            assert second.cancel()
            assert third.cancel()
            assert not first.cancel(), "the disk cannot be called back"
        first.result(20)
        for transfer in (second, third):
            transfer.released.result(20)
            with pytest.raises(CancelledError):
                transfer.result(20)
        assert tier.usage().used_bytes == used_bytes + 5 * BLOCK_BYTES
        assert tier.lookup(key_of(2)) is None
        assert not into.any()
        del into
        tier.begin_delete(key_of(9)).result(20)


def test_close_with_work_in_flight_finishes_it_or_keeps_the_file_locked(
    path: Path, device: KernelDevice, direct: Way
) -> None:
    with opened(path, device, direct) as tier:
        with soon(tier), gds_driver.holding():
            late = begin_write(tier, device, 1, 1, NUM_BYTES)
            gds_driver.wait_held()
            with pytest.raises(DrainTimeout, match="1 threads wait for disk or device"):
                tier.close()
            with pytest.raises(PoolClosed):
                begin_write(tier, device, 2, 1, NUM_BYTES)
            with pytest.raises(SlabInUse):
                Slab(path, fingerprint=FINGERPRINT, options=options_of(BLOCKS))
            assert tier.usage().used_bytes == 5 * BLOCK_BYTES
        late.released.result(20)
        tier.close()
        tier.close()
    with opened(path, device, direct) as tier:
        assert tier.chunks() == []


def test_close_finishes_what_was_begun(path: Path, device: KernelDevice, way: Way) -> None:
    with opened(path, device, way) as tier:
        begun = [begin_write(tier, device, number, 1, NUM_BYTES) for number in range(6)]
        tier.close()
        assert all(transfer.result(0).generation == 1 for transfer in begun)
    with opened(path, device, way) as tier:
        assert len(tier.chunks()) == 6


def test_pending_transfers_are_bounded(path: Path, device: KernelDevice, direct: Way) -> None:
    with opened(path, device, direct, small(pending_max=2)) as tier:
        with gds_driver.holding():
            begun = [begin_write(tier, device, number, 1, NUM_BYTES) for number in (1, 2)]
            used_bytes = tier.usage().used_bytes
            with pytest.raises(WouldBlock, match="pending_max=2"):
                begin_write(tier, device, 3, 1, NUM_BYTES)
            assert tier.usage().used_bytes == used_bytes
        for transfer in begun:
            transfer.result(20)
        begin_write(tier, device, 3, 1, NUM_BYTES).result(20)


def test_memory_is_let_go_of_with_its_transfer_whatever_an_earlier_one_waits_for(
    path: Path, device: KernelDevice, way: Way
) -> None:
    with opened(path, device, way) as tier:
        gate, before = device.create_promise(), control.live(0)
        first = begin_write(tier, device, 1, 1, NUM_BYTES, after=gate)
        for number in (2, 3):
            begin_write(tier, device, number, 1, NUM_BYTES).result(20)
        wait_until(lambda: control.live(0) == before + 1)
        gate.set()
        first.result(20)


def test_request_whose_end_nobody_can_tell_keeps_memory_and_extent_for_good(path: Path) -> None:
    device = KernelDevice()
    KEPT.append(device)
    slab = Slab(path, fingerprint=FINGERPRINT, options=options_of(BLOCKS))
    tier = GdsSlab(slab, device, options=small(), files=[lambda: KvikioFile(path, device, *DIRECT[0])])
    KEPT.append(tier)
    with gds_driver.holding():
        before = control.live(0)
        control.fail("cuStreamSynchronize", 1, control.NOT_SUPPORTED)
        late = begin_write(tier, device, 1, 1, NUM_BYTES, checksum=checksum_of(1, 1))
        gds_driver.wait_held()
        with pytest.raises(EndUnknown, match="whether the request goes on is unknown"):
            late.result(20)
        released = late.released
        del late
        tier._threads._watched.clear()  # as its deadline does
        control.collect()
        assert control.live(0) == before + 1, "the memory is not freed, whoever forgets the transfer"
    assert not released.done()
    assert tier.usage().used_bytes == 5 * BLOCK_BYTES
    with pytest.raises(
        DrainTimeout, match="the end of 1 requests is unknown, their memory stays in use: end the process"
    ):
        tier.close()
    with pytest.raises(SlabInUse):
        Slab(path, fingerprint=FINGERPRINT, options=options_of(BLOCKS))
    assert device.close(LONG_S) == []
