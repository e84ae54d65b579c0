"""A pool of a small layout, and a device whose copies can be made to fail."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from swapkv import (
    HostDevice,
    KVDtype,
    KVLayout,
    Pool,
    SwapConfig,
    open_pool,
)
from swapkv.streams.host import Operation


def small_layout(page_size: int = 4, chunk_tokens: int = 8, windows: list[int | None] | None = None) -> KVLayout:
    return KVLayout.dense(
        num_layers=2,
        num_kv_heads=1,
        head_dim=8,
        dtype=KVDtype.FLOAT32,
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        windows=windows,
    )


class FaultyDevice(HostDevice):
    """A host device whose copies do what `fault` says before they run."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Callable[[Operation], None] = lambda operation: None

    def execute(self, operation: Operation) -> None:
        self.fault(operation)
        super().execute(operation)


@asynccontextmanager
async def pool_of(
    layout: KVLayout | None = None,
    pages: int = 16,
    host_chunks: int = 16,
    config: SwapConfig | None = None,
    device: HostDevice | None = None,
) -> AsyncIterator[Pool]:
    layout = layout or small_layout()
    largest = max(layout.chunk_bytes(g) for g in range(len(layout.groups)))  # type: ignore[arg-type]
    async with open_pool(
        layout, num_pages=pages, host_bytes=host_chunks * largest, config=config, device=device
    ) as pool:
        yield pool
        pool._core.check()
