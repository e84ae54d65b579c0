"""Bytes through the GDS tier with the real kvikio: its compatibility mode on the driver of the tests, and its direct path on
their cuFile. And which of the ways it takes, and why."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("kvikio") is None:
    pytest.skip("kvikio is not installed: `make test` does that", allow_module_level=True)

from tests.cudahost import gds_driver  # before kvikio is loaded

# isort: split
from swapkv.errors import ChecksumMismatch, DrainTimeout, ProtocolError, TransferError
from swapkv.streams.host import HostDevice
from swapkv.tiers import gds_kvikio
from swapkv.tiers.direct_io import DirectMode, Scratch
from swapkv.tiers.gds import GdsSlab
from swapkv.tiers.gds_kvikio import KvikioFile
from swapkv.tiers.gds_types import DeviceRead, DeviceWrite, GdsOptions, GdsPath, PayloadCheck, Span
from swapkv.tiers.slab import Slab
from swapkv.tiers.slab_header import BLOCK_BYTES, payload_checksum
from tests.cudahost import gds_scene
from tests.cudahost.gds_scene import (
    BLOCKS,
    DIRECT,
    SOON_NS,
    WAYS,
    Way,
    begin_write,
    memory_of,
    name_of,
    opened,
    read_back,
    small,
)
from tests.cudahost.kernels import KernelDevice
from tests.kit.slab import FINGERPRINT, fetch, key_of, options_of, stamped, write_of

SIZES = [1, 4095, 4096, 4097, 3 * 4096, 100_001, 1 << 20]


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


def test_what_the_tier_wrote_both_read_and_the_other_way_round(path: Path, device: KernelDevice, way: Way) -> None:
    with opened(path, device, way) as tier:
        assert (tier.report.path, tier.report.order) == way
        for generation, num_bytes in enumerate(SIZES, 1):
            for number, offset in ((1, 0), (2, 24)):
                expected = stamped(number, generation, num_bytes)
                memory = memory_of(device, expected, offset)
                header = tier.begin_write(DeviceWrite(key=key_of(number), generation=generation, memory=memory)).result(
                    20
                )
                assert header.checksum == payload_checksum(memoryview(expected))
                assert fetch(tier.slab, number) == read_back(tier, device, number, num_bytes, offset) == expected
            tier.slab.begin_write(write_of(3, generation, num_bytes)).result(20)
            assert read_back(tier, device, 3, num_bytes, 8) == stamped(3, generation, num_bytes)
        del memory
    with opened(path, device, way) as tier:
        assert len(tier.chunks()) == 3
        assert dict(tier.usage().discarded) == {}
        for number in (1, 2, 3):
            assert read_back(tier, device, number, SIZES[-1]) == stamped(number, len(SIZES), SIZES[-1])


def test_memory_of_any_dtype_and_shape_is_its_bytes(path: Path, device: KernelDevice, way: Way) -> None:
    with opened(path, device, way) as tier:
        memory = memory_of(device, stamped(1, 1, 4096)).view(torch.float32).view(16, 4, 16)
        tier.begin_write(DeviceWrite(key=key_of(1), generation=1, memory=memory)).result(20)
        assert fetch(tier.slab, 1) == stamped(1, 1, 4096)
        del memory


def test_behind_a_payload_there_are_zeros(path: Path, device: KernelDevice, way: Way) -> None:
    with opened(path, device, way) as tier:
        old = begin_write(tier, device, 1, 1, 3 * BLOCK_BYTES).result(20)
        tier.begin_delete(key_of(1)).result(20)
        new = begin_write(tier, device, 2, 1, 2 * BLOCK_BYTES + 5).result(20)
        assert new.offset == old.offset
        with path.open("rb") as file:
            file.seek(new.payload_offset)
            assert file.read(3 * BLOCK_BYTES) == stamped(2, 1, 2 * BLOCK_BYTES + 5).ljust(3 * BLOCK_BYTES, b"\0")


def test_checksum_that_the_caller_has_is_taken_as_it_is(path: Path, device: KernelDevice, way: Way) -> None:
    with opened(path, device, way) as tier:
        checksum = payload_checksum(memoryview(stamped(1, 1, 9000)))
        begin_write(tier, device, 1, 1, 9000, checksum=checksum).result(20)
        assert fetch(tier.slab, 1) == stamped(1, 1, 9000)
        begin_write(tier, device, 2, 1, 9000, checksum=checksum).result(20)
        with pytest.raises(ChecksumMismatch):
            fetch(tier.slab, 2)
        with pytest.raises(ProtocolError, match="a checksum of 4 bytes: pass the 16"):
            begin_write(tier, device, 3, 1, 9000, checksum=b"1234")


def test_payload_that_changed_on_the_disk_is_refused_unless_nobody_is_to_look(
    path: Path, device: KernelDevice, way: Way
) -> None:
    for check in PayloadCheck:
        path.unlink(missing_ok=True)
        with opened(path, device, way, small(check=check)) as tier:
            header = begin_write(tier, device, 1, 1, 9000).result(20)
            tier.slab.file.write(memoryview(b"?"), header.payload_offset, Scratch())
            into = device.allocate(9000)
            transfer = tier.begin_read(DeviceRead(key=key_of(1), into=into))
            if check is PayloadCheck.ALWAYS:
                with pytest.raises(ChecksumMismatch, match="the disk gave other bytes"):
                    transfer.result(20)
                assert dict(tier.usage().failures) == {"checksum": 1}
            else:
                transfer.result(20)
                assert into[0] == ord("?")
            del into, transfer


def reported(
    path: Path, device: KernelDevice, *, direct: DirectMode = DirectMode.AUTO, blocks: int = BLOCKS
) -> GdsSlab:
    """The tier on the way that it chooses itself, closed."""
    slab = Slab(path, fingerprint=FINGERPRINT, options=options_of(blocks))
    tier = GdsSlab(slab, device, options=small(direct=direct))
    tier.close()
    return tier


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """nvidia-fs is there."""
    monkeypatch.setattr(gds_kvikio, "NVIDIA_FS", tmp_path)


def test_without_the_kernel_module_bytes_are_bounced_and_the_report_says_so(path: Path, device: KernelDevice) -> None:
    report = reported(path, device).report
    assert report.path is GdsPath.BOUNCED
    assert report.note == "/proc/driver/nvidia-fs is missing: load the kernel module nvidia-fs"
    assert report.num_bytes == 8192
    assert min(report.write_bytes_per_s, report.read_bytes_per_s) > 0
    assert "kvikio 26" in report.describe()


@pytest.mark.usefixtures("module")
def test_with_all_there_the_direct_way_on_streams_is_taken(path: Path, device: KernelDevice) -> None:
    report = reported(path, device).report
    assert (report.path, report.order, report.note) == (*DIRECT[0], "")
    assert gds_driver.requests() >= 2


@pytest.mark.usefixtures("module")
def test_direct_way_that_is_not_wanted_is_not_tried(path: Path, device: KernelDevice) -> None:
    before = gds_driver.requests()
    assert reported(path, device, direct=DirectMode.NEVER).report.path is GdsPath.BOUNCED
    assert gds_driver.requests() == before


@pytest.mark.usefixtures("module")
def test_file_that_cufile_does_not_take_is_bounced_with_its_reason_and_the_file_system(
    path: Path, device: KernelDevice
) -> None:
    with gds_driver.refusing(5000 + 7):
        report = reported(path, device).report
    assert report.path is GdsPath.BOUNCED
    assert f"cuFile does not take {path} on {gds_kvikio.file_system_of(path)}" in report.note
    assert report.note.count("cuFile does not take") == 1, "one reason is said once"


@pytest.mark.usefixtures("module")
def test_way_whose_probe_fails_is_passed_over_and_its_extent_is_free_again(path: Path, device: KernelDevice) -> None:
    gds_driver.fail(1, gds_driver.OWN_ERROR)
    tier = reported(path, device)
    assert (tier.report.path, tier.report.order) == DIRECT[1]
    assert "cuFile failed" in tier.report.note
    assert tier.usage().used_bytes == 0


class WrongFile(KvikioFile):
    """Says that it wrote, and did not."""

    def write(self, span: Span, offset: int, stream: object) -> int:
        return span.num_bytes


def test_way_that_gives_other_bytes_back_is_not_taken(path: Path, device: KernelDevice) -> None:
    slab = Slab(path, fingerprint=FINGERPRINT, options=options_of(BLOCKS))
    with pytest.raises(TransferError, match="the probe read other bytes than it wrote"):
        GdsSlab(slab, device, options=small(), files=[lambda: WrongFile(path, device, *WAYS[2])])
    assert slab.usage().used_bytes == 0
    slab.close()


def test_other_file_than_the_slabs_is_found_by_the_probe(path: Path, device: KernelDevice) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(BLOCKS * BLOCK_BYTES))
    slab = Slab(path, fingerprint=FINGERPRINT, options=options_of(BLOCKS))
    with pytest.raises(TransferError, match="the probe read other bytes than it wrote"):
        GdsSlab(slab, device, options=small(), files=[lambda: KvikioFile(other, device, *WAYS[2])])
    slab.close()


def test_slab_without_room_for_the_probe_opens_and_says_that_it_is_not_probed(path: Path, device: KernelDevice) -> None:
    report = reported(path, device, blocks=3).report
    assert "not probed: a chunk of 8192 bytes in a slab of 12288" in report.note
    assert report.num_bytes == 0


def test_probe_that_hangs_ends_at_its_deadline(path: Path, device: KernelDevice) -> None:
    slab = Slab(path, fingerprint=FINGERPRINT, options=options_of(BLOCKS))
    with gds_driver.holding():
        with pytest.raises(DrainTimeout, match=r"not open and probed after 1000000000 ns: .*DirectMode.NEVER"):
            GdsSlab(
                slab, device, options=small(deadline_ns=SOON_NS), files=[lambda: KvikioFile(path, device, *DIRECT[1])]
            )
        gds_driver.wait_held()
        assert slab.usage().used_bytes == 3 * BLOCK_BYTES, "the extent is nobody's while it may be written"
    gds_scene.wait_until(lambda: not slab.usage().used_bytes)
    slab.close()


def test_memory_that_is_none_of_a_device_is_refused(path: Path, device: KernelDevice, way: Way) -> None:
    with opened(path, device, way) as tier:
        with pytest.raises(ProtocolError, match="are not memory of a CUDA device"):
            tier.begin_write(DeviceWrite(key=key_of(1), generation=1, memory=torch.zeros(10)))
        with (
            gds_scene.kernel_device(1) as other,
            pytest.raises(ProtocolError, match="memory of device 1 for a slab of"),
        ):
            tier.begin_write(DeviceWrite(key=key_of(1), generation=1, memory=other.allocate(10)))
        with pytest.raises(ProtocolError, match="contiguous"):
            tier.begin_write(DeviceWrite(key=key_of(1), generation=1, memory=device.allocate(100)[::2]))
        assert tier.usage().used_bytes == 0
    slab = Slab(path, fingerprint=FINGERPRINT, options=options_of(BLOCKS))
    with pytest.raises(ProtocolError, match="is none of CUDA's: use `Slab`"):
        GdsSlab(slab, HostDevice())
    slab.close()


def test_options_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ProtocolError, match="stage_bytes=4096 must be a multiple of 8192"):
        GdsOptions(stage_bytes=4096)
    with pytest.raises(ProtocolError, match="depth=0 must be at least 1"):
        GdsOptions(depth=0)
