"""Host memory that a device copies from and to at full speed: one allocation, touched before it is used, and pinned.

One arena is one mapping of as many bytes as were asked for: allocators that cache pinned memory round up to a power of
two. Its size is compared with what the system allows before a byte is touched, because a container that exceeds its
limit is not told: it is killed.
"""

import ctypes
import mmap
import os
import resource
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import attrs
import torch

from swapkv.errors import BudgetExhausted, TransferError

_PAGE_BYTES = mmap.PAGESIZE
_HUGE_BYTES = 2 << 20
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}
_NODES_MAX = 1024
_UNLIMITED_BYTES = 1 << 60


class HugePages(Enum):
    """Whether the arena is to be of huge pages (transparent ones, by `madvise`)."""

    NO = "no"
    ASK = "ask"


class Numa(Enum):
    """On which node of the host's memory the arena is to be."""

    ANY = "any"
    NEAR = "near"
    """On the one that is nearest to the device, if the system says which."""


class LockedMemory(Enum):
    """What `RLIMIT_MEMLOCK` means for an arena. NVIDIA's driver as a rule pins beyond it, other drivers may not."""

    ADVISE = "advise"
    """Name it if the driver refuses to pin the arena."""
    ENFORCE = "enforce"
    """Refuse an arena that is larger."""


@attrs.frozen(kw_only=True)
class MemoryLimits:
    """What the system allows; None: no limit. `container_bytes`: what is left of the memory of the control group."""

    locked_bytes: int | None
    container_bytes: int | None

    @classmethod
    def read(cls, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> "MemoryLimits":
        """The limits of this process now."""
        soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        locked = None if soft == resource.RLIM_INFINITY else soft
        return cls(locked_bytes=locked, container_bytes=_container_bytes(root, membership))


@attrs.frozen(kw_only=True)
class PinnedOptions:
    """How an arena is made."""

    huge_pages: HugePages = HugePages.NO
    numa: Numa = Numa.NEAR
    locked_memory: LockedMemory = LockedMemory.ADVISE


class PinnedArena:
    """`num_bytes` of host memory, zeroed and touched. `memory`: uint8 `[num_bytes]`, which keeps the mapping alive.

    `near_node`: the NUMA node that is nearest to the device. `notes`: what was asked for and not had, and why; empty
    if all was.
    Raises `BudgetExhausted`, with the value, the limit and the remedy, for an arena that the system does not allow.
    """

    def __init__(
        self,
        num_bytes: int,
        options: PinnedOptions,
        *,
        near_node: int | None = None,
        limits: MemoryLimits | None = None,
    ) -> None:
        self.num_bytes = num_bytes
        self.notes: list[str] = []
        self._limits = limits or MemoryLimits.read()
        self._unregister: Callable[[int], None] | None = None
        self._check_limits(options)
        step = _HUGE_BYTES if options.huge_pages is HugePages.ASK else _PAGE_BYTES
        self.mapped_bytes = max(step, -(-num_bytes // step) * step)
        self._raw = self._map(step)
        self.address = -(-self._raw.data_ptr() // step) * step
        begin = self.address - self._raw.data_ptr()
        if options.huge_pages is HugePages.ASK:
            self._ask_for_huge_pages()
        if options.numa is Numa.NEAR and near_node is not None:
            self._prefer_node(near_node)
        self.memory = self._raw[begin : begin + num_bytes]
        self._raw[begin : begin + self.mapped_bytes].zero_()

    @property
    def is_pinned(self) -> bool:
        return self._unregister is not None

    def pin(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        """Pin the memory by `register(address, num_bytes)`; `unregister(address)` undoes it.

        Raises `BudgetExhausted` if the driver refuses; then nothing is pinned.
        """
        try:
            register(self.address, self.mapped_bytes)
        except TransferError as error:
            raise BudgetExhausted(
                f"the driver pins no {self.mapped_bytes} bytes ({error}): ask for a smaller host tier{self._advice()}"
            ) from error
        self._unregister = unregister

    def unpin(self) -> None:
        """Let go of the pin. Idempotent. The memory stays as long as a tensor refers to it."""
        unregister, self._unregister = self._unregister, None
        if unregister is not None:
            unregister(self.address)

    def _check_limits(self, options: PinnedOptions) -> None:
        limits = self._limits
        if limits.container_bytes is not None and self.num_bytes > limits.container_bytes:
            raise BudgetExhausted(
                f"host memory of {self.num_bytes} bytes, and the container has {limits.container_bytes} bytes left of "
                "its limit (memory.max): ask for less, or start the container with a higher limit (docker run --memory)"
            )
        enforced = options.locked_memory is LockedMemory.ENFORCE
        if enforced and limits.locked_bytes is not None and self.num_bytes > limits.locked_bytes:
            raise BudgetExhausted(
                f"pinned memory of {self.num_bytes} bytes, and this process may lock {limits.locked_bytes} bytes "
                f"(RLIMIT_MEMLOCK){self._advice()}, or pass LockedMemory.ADVISE"
            )

    def _advice(self) -> str:
        locked = self._limits.locked_bytes
        if locked is None or locked >= self.num_bytes:
            return ""
        return f"; RLIMIT_MEMLOCK is {locked} bytes: raise it (ulimit -l unlimited, docker run --ulimit memlock=-1)"

    def _map(self, step: int) -> torch.Tensor:
        try:
            mapping = mmap.mmap(-1, self.mapped_bytes + step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise BudgetExhausted(
                f"the host maps no {self.mapped_bytes} bytes ({error}): ask for less or free some"
            ) from error
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def _ask_for_huge_pages(self) -> None:
        """Before the first touch: what is touched has its size already."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(self.mapped_bytes), mmap.MADV_HUGEPAGE):
            self.notes.append(f"huge pages: {os.strerror(ctypes.get_errno())}")

    def _prefer_node(self, node: int) -> None:
        """Before the first touch, which is what places a page."""
        number = _MBIND.get(os.uname().machine)
        if number is None:
            self.notes.append(f"NUMA node {node}: no binding on {os.uname().machine}")
            return
        mask = (ctypes.c_ulong * (_NODES_MAX // 64))()
        mask[node // 64] = 1 << (node % 64)
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (ctypes.c_void_p(self.address), ctypes.c_ulong(self.mapped_bytes), ctypes.c_int(_MPOL_PREFERRED))
        if libc.syscall(ctypes.c_long(number), *arguments, mask, ctypes.c_ulong(_NODES_MAX), ctypes.c_uint(0)):
            self.notes.append(f"NUMA node {node}: {os.strerror(ctypes.get_errno())}")


def _container_bytes(root: Path, membership: Path) -> int | None:
    """What the tightest control group above this process has left, in version 2 or version 1 of them."""
    left = [
        _left(folder, limit, usage)
        for folder, limit, usage in (
            *((folder, "memory.max", "memory.current") for folder in _groups(root, membership)),
            (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        )
    ]
    return min((value for value in left if value is not None), default=None)


def _groups(root: Path, membership: Path) -> list[Path]:
    """The control group of this process and all above it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return [root]
    own = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    folder = root / own
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _left(folder: Path, limit: str, usage: str) -> int | None:
    try:
        limit_bytes = int((folder / limit).read_text())
        used_bytes = int((folder / usage).read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None
    return None if limit_bytes >= _UNLIMITED_BYTES else max(0, limit_bytes - used_bytes)
