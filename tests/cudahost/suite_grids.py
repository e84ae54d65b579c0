"""Pages of planes with gaps: adjacent ones are one operand, byte for byte, and only they are copied in that way."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from swapkv import KVDtype, KVLayout
from swapkv.config import Verify
from swapkv.errors import ProtocolError
from swapkv.streams.base import Block, Region
from swapkv.streams.cuda_copies import Direction, Way, plan
from swapkv.streams.cuda_driver import CudaError
from swapkv.streams.cuda_grids import PITCH_MAX, GridCopy, grids_of
from swapkv.streams.cuda_probe import CopyRate, Preference
from tests.cudahost import control
from tests.cudahost.kernels import LONG_S, KernelDevice, opened
from tests.cudahost.pages import block_of, region_of


@pytest.fixture(autouse=True)
def clean_driver() -> Iterator[None]:
    """Nothing that a correct program never does, and nothing left behind."""
    with control.fresh():
        yield
    control.collect()
    assert control.all_live() == []


def noise(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Random bytes, and a copy of them."""
    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return tensor.clone()


def heights(block: Block) -> list[int]:
    return [int(height) for height in plan([block]).grids().heights]


@pytest.mark.parametrize(
    ("pages", "gap", "expected"),
    [
        ([3, 4, 5, 6], 64, [4]),
        ([3, 4, 5, 6], 0, [1]),
        ([3, 4, 7, 8, 9], 64, [2, 3]),
        ([5, 4, 3], 64, [1, 1, 1]),
        ([1, 3, 5], 64, [1, 1, 1]),
        ([1, 2, 2, 3], 64, [2, 2]),
        ([], 64, []),
    ],
)
def test_adjacent_pages_with_gaps_are_one_grid(pages: list[int], gap: int, expected: list[int]) -> None:
    with opened(KernelDevice()) as device:
        block = block_of(device, [region_of(device, 12, 32, gap)], pages)
        assert heights(block) == expected
        del block


def test_planes_one_behind_the_other_are_grids_of_their_own() -> None:
    """The last page of one plane and the first of the next may lie a stride apart, but their host bytes do not."""
    with opened(KernelDevice()) as device:
        memory = device.allocate(8 * 48).view(8, 48)
        regions = [Region(layer=layer, name="k", pages=memory[4 * layer :][:4, :32]) for layer in range(2)]  # type: ignore[arg-type]
        assert heights(block_of(device, regions, [2, 3])) == [2, 2]
        assert heights(block_of(device, regions, [0, 1, 2, 3])) == [4, 4]
        del memory, regions


def test_pitch_that_no_card_takes_is_not_used() -> None:
    size = np.array([16, 16], dtype=np.uint64)
    for pitch, expected in ((PITCH_MAX, [2]), (PITCH_MAX + 1, [1, 1])):
        near = np.array([4096, 4096 + pitch], dtype=np.uint64)
        found = grids_of(near, np.array([0, 16], dtype=np.uint64), size, np.full(2, pitch, dtype=np.uint64))
        assert found.heights.tolist() == expected
        assert found.pitches.tolist() == ([pitch] if len(found) == 1 else [16, 16])


@pytest.mark.parametrize("seed", range(30))
def test_any_pages_of_planes_with_and_without_gaps_return_byte_for_byte(seed: int) -> None:
    random = np.random.default_rng(seed)
    control.timing(seed, 40)
    with opened(KernelDevice(way=Way.GRID)) as device:
        regions = [
            region_of(device, 40, int(random.integers(1, 200)), int(random.choice([0, 0, 1, 64, 500])), layer)
            for layer in range(3)
        ]
        before = [noise(region.pages, seed + region.layer) for region in regions]
        firsts = random.permutation(40)[: random.integers(0, 6)]
        pages = list(dict.fromkeys(int(page) for first in firsts for page in range(first, min(40, first + 7))))
        block = block_of(device, regions, pages)
        assert device.create_stream("out").gather([block], Verify.NONE).wait(LONG_S)
        for region, host, old in zip(regions, block.host, before, strict=True):
            assert torch.equal(host, old[pages])
            region.pages.fill_(0)
        assert device.create_stream("in").scatter([block], Verify.NONE).wait(LONG_S)
        for region, old in zip(regions, before, strict=True):
            kept = torch.zeros_like(old)
            kept[pages] = old[pages]
            assert torch.equal(region.pages, kept)
        assert control.calls("cuMemcpy3DBatchAsync_v2") == (2 if pages else 0)
        del regions, region, block


def test_k_and_v_side_by_side_in_an_engines_pages_are_one_grid_each() -> None:
    layout = KVLayout.dense(
        num_layers=1, num_kv_heads=2, head_dim=8, dtype=KVDtype.FLOAT16, page_size=4, chunk_tokens=8
    )
    with opened(KernelDevice(way=Way.GRID)) as device:
        engine = device.allocate(6 * 2 * 128).view(torch.float16).view(6, 2, 4, 2, 8)
        memory = device.adopt(layout, {(0, "k"): engine[:, 0], (0, "v"): engine[:, 1]})
        block = block_of(device, memory.regions[0], [1, 2, 3, 4])
        assert heights(block) == [4, 4]
        before = noise(engine.view(torch.uint8).view(6, 2, 128), 7)
        assert device.create_stream("out").gather([block], Verify.NONE).wait(LONG_S)
        for plane, host in enumerate(block.host):
            assert torch.equal(host, before[1:5, plane])
        del engine, memory, block


@pytest.mark.parametrize("version", [13000, 12080, 0])
def test_older_driver_is_used_as_far_as_it_goes(version: int) -> None:
    if version < 13000:
        control.hide("cuMemcpy3DBatchAsync_v2")
    if version < 12080:
        control.hide("cuMemcpy3DBatchAsync")
    grid = GridCopy.find()
    assert (grid.version if grid else 0) == version
    if grid is None:
        with pytest.raises(ProtocolError, match="way='grid': this driver has no cuMemcpy3DBatchAsync: update it"):
            KernelDevice(way=Way.GRID)
        return
    with opened(KernelDevice(way=Way.GRID)) as device:
        block = block_of(device, [region_of(device, 6, 32, 16)], [1, 2, 3])
        before = noise(block.regions[0].pages, 5)
        assert device.create_stream("out").gather([block], Verify.NONE).wait(LONG_S)
        assert torch.equal(block.host[0], before[1:4])
        control.fail("cuMemcpy3DBatchAsync_v2", 1, control.OUT_OF_MEMORY)
        refused, following = (device.create_stream(name).scatter([block], Verify.NONE) for name in ("one", "two"))
        with pytest.raises(CudaError, match="cuMemcpy3DBatchAsync: CUDA_ERROR_OUT_OF_MEMORY"):
            (refused.wait(LONG_S), following.wait(LONG_S))
        del block


def test_default_stream_takes_no_grids_and_copies_all_the_same() -> None:
    with opened(KernelDevice(way=Way.GRID)) as device:
        block = block_of(device, [region_of(device, 6, 32, 16)], [1, 2, 3])
        before = noise(block.regions[0].pages, 5)
        assert device.wrap_stream(0).gather([block], Verify.NONE).wait(LONG_S)
        assert torch.equal(block.host[0], before[1:4])
        assert control.calls("cuMemcpy3DBatchAsync_v2") == 0
        del block


def test_grids_are_chosen_for_adjacent_pages_with_gaps_only() -> None:
    rates = [
        CopyRate(way, direction, 4096, speed)
        for direction in Direction
        for way, speed in ((Way.BATCH, 2e9), (Way.GRID, 9e9), (Way.KERNEL, 3e9))
    ]
    preference = Preference(tuple(rates), Way.BATCH)
    with opened(KernelDevice()) as device:
        gaps, none = region_of(device, 12, 4096, 4096), region_of(device, 12, 4096)
        for region, pages, way in (
            (gaps, [2, 3, 4, 5], Way.GRID),
            (gaps, [2, 4, 6, 8], Way.KERNEL),
            (gaps, [2, 3, 6, 8], Way.KERNEL),
            (none, [2, 4, 6, 8], Way.KERNEL),
        ):
            block = block_of(device, [region], pages)
            assert preference.choose(Direction.OUT, plan([block])) is way
        del gaps, none, region, block


def test_rate_of_grids_is_not_told_as_one_of_scattered_pages() -> None:
    with opened(KernelDevice(way=None)) as device:
        assert Way.GRID in {rate.way for rate in device.rates}
        assert "grid" not in {way.way for way in device.chosen_ways()}
