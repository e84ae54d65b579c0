"""The pinned arena: its size, its limits, and what it gives back. No driver is needed for that."""

import gc
from pathlib import Path

import pytest
import torch

from swapkv import BudgetExhausted, TransferError
from swapkv.tiers.pinned import HugePages, LockedMemory, MemoryLimits, Numa, PinnedArena, PinnedOptions

NO_LIMITS = MemoryLimits(locked_bytes=None, container_bytes=None)
PAGE = 4096


class Driver:
    """Notes what it pins, or refuses to."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.pinned: dict[int, int] = {}
        self._refuses = refuses

    def register(self, address: int, num_bytes: int) -> None:
        if self._refuses:
            raise TransferError("CUDA_ERROR_OUT_OF_MEMORY")
        self.pinned[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE, 3 * PAGE, 5 << 20])
@pytest.mark.parametrize("huge", list(HugePages))
def test_arena_of_any_size_is_zeroed_aligned_and_not_rounded_to_a_power_of_two(num_bytes: int, huge: HugePages) -> None:
    step = 2 << 20 if huge is HugePages.ASK else PAGE
    arena = PinnedArena(num_bytes, PinnedOptions(huge_pages=huge), limits=NO_LIMITS)
    assert arena.memory.dtype == torch.uint8
    assert tuple(arena.memory.shape) == (num_bytes,)
    assert not arena.memory.any()
    assert arena.address % step == 0
    assert num_bytes == 0 or arena.memory.data_ptr() == arena.address
    assert num_bytes <= arena.mapped_bytes < num_bytes + step + (num_bytes == 0)


def test_arena_is_pinned_whole_and_unpinned_once() -> None:
    arena, driver = PinnedArena(5000, PinnedOptions(), limits=NO_LIMITS), Driver()
    assert not arena.is_pinned
    arena.pin(driver.register, driver.unregister)
    assert arena.is_pinned
    assert driver.pinned == {arena.address: 8192}
    arena.unpin()
    arena.unpin()
    assert driver.pinned == {}
    assert not arena.is_pinned


def test_memory_outlives_the_arena() -> None:
    arena = PinnedArena(5000, PinnedOptions(), limits=NO_LIMITS)
    part = arena.memory[100:200]
    part.fill_(7)
    del arena
    gc.collect()
    assert part.eq(7).all()


def test_arena_beyond_the_container_is_refused_before_a_byte_is_touched() -> None:
    limits = MemoryLimits(locked_bytes=None, container_bytes=10_000)
    with pytest.raises(
        BudgetExhausted, match=r"1099511627776 bytes.*10000 bytes left.*memory\.max.*docker run --memory"
    ):
        PinnedArena(1 << 40, PinnedOptions(), limits=limits)
    assert PinnedArena(10_000, PinnedOptions(), limits=limits).num_bytes == 10_000


def test_arena_beyond_what_may_be_locked_is_refused_if_that_is_enforced() -> None:
    limits = MemoryLimits(locked_bytes=65_536, container_bytes=None)
    enforced = PinnedOptions(locked_memory=LockedMemory.ENFORCE)
    with pytest.raises(BudgetExhausted, match=r"65537 bytes.*may lock 65536 bytes.*RLIMIT_MEMLOCK.*memlock=-1"):
        PinnedArena(65_537, enforced, limits=limits)
    assert PinnedArena(65_536, enforced, limits=limits).num_bytes == 65_536
    assert PinnedArena(65_537, PinnedOptions(), limits=limits).num_bytes == 65_537


@pytest.mark.parametrize(("locked_bytes", "advises"), [(65_536, True), (1 << 20, False), (None, False)])
def test_refusal_of_the_driver_names_the_limit_that_may_be_behind_it(locked_bytes: int | None, advises: bool) -> None:
    limits = MemoryLimits(locked_bytes=locked_bytes, container_bytes=None)
    arena, driver = PinnedArena(100_000, PinnedOptions(), limits=limits), Driver(refuses=True)
    with pytest.raises(BudgetExhausted, match="the driver pins no 102400 bytes .*OUT_OF_MEMORY") as caught:  # noqa: RUF043
        arena.pin(driver.register, driver.unregister)
    assert ("RLIMIT_MEMLOCK is 65536 bytes: raise it" in str(caught.value)) == advises
    assert not arena.is_pinned


def test_arena_that_the_host_cannot_map_is_refused() -> None:
    with pytest.raises(BudgetExhausted, match="the host maps no"):
        PinnedArena(1 << 60, PinnedOptions(), limits=NO_LIMITS)


@pytest.mark.parametrize("numa", list(Numa))
def test_node_that_does_not_exist_is_noted_and_the_arena_is_there_all_the_same(numa: Numa) -> None:
    arena = PinnedArena(PAGE, PinnedOptions(numa=numa), near_node=900, limits=NO_LIMITS)
    assert bool(arena.notes) == (numa is Numa.NEAR)
    assert all(note.startswith("NUMA node 900: ") for note in arena.notes)
    assert not arena.memory.any()


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def read(root: Path, membership: str) -> int | None:
    file = root.parent / "membership"
    file.write_text(membership)
    return MemoryLimits.read(root, file).container_bytes


def test_limit_of_a_container_is_what_the_tightest_group_above_has_left(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "a" / "b", memory__max="max\n", memory__current="5000\n")
    group(root / "a", memory__max="9000\n", memory__current="6000\n")
    group(root, memory__max="100000\n", memory__current="7000\n")
    assert read(root, "0::/a/b\n") == 3000
    assert read(root, "0::/\n") == 93000
    group(root / "a", memory__current="9500\n")
    assert read(root, "0::/a/b\n") == 0


def test_limit_of_a_container_in_version_1_is_read_and_none_is_none(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "memory", memory__limit_in_bytes="4000\n", memory__usage_in_bytes="1500\n")
    assert read(root, "5:memory:/x\n") == 2500
    group(root / "memory", memory__limit_in_bytes=f"{(1 << 63) - 4096}\n")
    assert read(root, "5:memory:/x\n") is None
    assert read(tmp_path / "nothing", "") is None


def test_limits_of_this_process_are_read() -> None:
    limits = MemoryLimits.read()
    assert limits.locked_bytes is None or limits.locked_bytes >= 0
    assert limits.container_bytes is None or limits.container_bytes > 0
