"""Page copies: byte-exact for every page size, stride, selection and dtype, and never a byte elsewhere."""

import zlib

import pytest
import torch

from swapkv.config import Verify
from swapkv.errors import ChecksumMismatch, ProtocolError
from swapkv.ids import LayerId
from swapkv.layout import KVDtype, KVLayout
from swapkv.streams.base import Block, Region
from swapkv.streams.copies import (
    check_block,
    check_pages,
    checksum,
    clone_pages,
    gather_block,
    gather_blocks,
    scatter_block,
    scatter_blocks,
)
from swapkv.streams.host import HostDevice
from swapkv.streams.memory import PagedMemory

NUM_PAGES = 12
SELECTIONS = {
    "empty": [],
    "one": [7],
    "run": [3, 4, 5, 6],
    "whole": list(range(NUM_PAGES)),
    "fragmented": [9, 2, 11, 0, 5],
    "descending": [6, 5, 4],
    "run_with_swapped_middle": [3, 5, 4, 6],
}


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def make_region(page_bytes: int, gap: int = 0, layer: int = 0, seed: int = 0) -> tuple[Region, torch.Tensor]:
    """A region of random pages, and the memory under it, `[NUM_PAGES, page_bytes + gap]`."""
    memory = random_bytes(NUM_PAGES, page_bytes + gap, seed=seed)
    return Region(layer=LayerId(layer), name="k", pages=memory[:, :page_bytes]), memory


def make_block(regions: list[Region], pages: list[int], before: int = 0, seed: int = 9) -> Block:
    host = [random_bytes(len(pages), region.page_bytes, seed=seed) for region in regions]
    index = torch.tensor(pages, dtype=torch.int64)
    return Block(regions=regions, pages=index, host=host, guarded=host, checksums=[before] * len(regions))


selections = pytest.mark.parametrize("pages", SELECTIONS.values(), ids=SELECTIONS.keys())
page_sizes = pytest.mark.parametrize("page_bytes", [1, 3, 8, 96, 512, 4097])
gaps = pytest.mark.parametrize("gap", [0, 1, 64])


@selections
@page_sizes
@gaps
def test_gather_of_any_pages_is_byte_exact(pages: list[int], page_bytes: int, gap: int) -> None:
    region, memory = make_region(page_bytes, gap)
    before = memory.clone()
    block = make_block([region], pages)
    gather_block(block)
    assert torch.equal(block.host[0], before[pages, :page_bytes])
    assert torch.equal(memory, before)


@selections
@page_sizes
@gaps
def test_scatter_to_any_pages_writes_these_bytes_and_no_others(pages: list[int], page_bytes: int, gap: int) -> None:
    region, memory = make_region(page_bytes, gap)
    block = make_block([region], pages)
    expected = memory.clone()
    expected[pages, :page_bytes] = block.host[0]
    scatter_block(block)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("dtype", KVDtype)
def test_round_trip_of_a_dtype_through_other_pages_keeps_its_bits(dtype: KVDtype) -> None:
    layout = KVLayout.dense(
        num_layers=1, num_kv_heads=2, head_dim=3, value_head_dim=5, page_size=4, chunk_tokens=8, dtype=dtype
    )
    memory = PagedMemory.allocate(layout, [NUM_PAGES], HostDevice())
    regions = memory.regions[0]
    for seed, region in enumerate(regions):
        region.pages.copy_(random_bytes(*region.pages.shape, seed=seed))
    saved = make_block(list(regions), [8, 1, 4])
    gather_block(saved)
    target = torch.tensor([0, 11, 5])
    scatter_block(Block(regions=regions, pages=target, host=saved.host, guarded=saved.guarded))
    for name in ("k", "v"):
        plane = memory.plane(0, name)
        assert torch.equal(plane[[0, 11, 5]].view(torch.uint8), plane[[8, 1, 4]].view(torch.uint8))


def test_copies_of_inference_tensors_from_outside_inference_mode_work() -> None:
    with torch.inference_mode():
        region, memory = make_region(16)
        block = make_block([region], [2, 9])
    scatter_block(block)
    clone_pages([region], torch.tensor([2]), torch.tensor([3]))
    assert torch.equal(memory[[2, 9, 3]], block.host[0][[0, 1, 0]])


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([1], [2]),
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([5, 3], [3, 5]),
        ([4, 3, 2], [0, 1, 2]),
        ([0, 1, 2], [9, 4, 1]),
        ([], []),
    ],
)
@gaps
def test_clone_with_overlap_reads_all_before_it_writes(source: list[int], target: list[int], gap: int) -> None:
    regions, memories = zip(*(make_region(24, gap, seed=seed) for seed in (0, 1)), strict=True)
    expected = [memory.clone() for memory in memories]
    for memory in expected:
        memory[target, :24] = memory[source, :24].clone()
    clone_pages(regions, torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64))
    for memory, wanted in zip(memories, expected, strict=True):
        assert torch.equal(memory, wanted)


def test_checksum_of_several_tensors_is_that_of_their_bytes_joined() -> None:
    tensors = [random_bytes(3, 5), random_bytes(0, 5), random_bytes(7, 2, seed=1)]
    assert checksum(tensors) == zlib.crc32(b"".join(bytes(tensor.numpy()) for tensor in tensors))
    assert checksum([]) == 0


def test_gather_with_verify_continues_the_checksum_over_what_it_copied() -> None:
    region, _ = make_region(32)
    slot = random_bytes(5, 32)
    before = zlib.crc32(bytes(slot[:3].numpy()))
    tail = Block(regions=[region], pages=torch.tensor([6, 1]), host=[slot[3:]], checksums=[before], sealed=1)
    sums = gather_blocks([tail], Verify.CRC32)
    assert sums == (zlib.crc32(bytes(slot[:4].numpy())), zlib.crc32(bytes(slot.numpy())))
    assert torch.equal(slot[3:], region.pages[[6, 1]])
    assert gather_blocks([tail], Verify.NONE) == ()


def test_gather_with_verify_does_not_hash_anew_what_it_did_not_copy() -> None:
    """A bit that flips in the tier between two delta copies must not be blessed by the second."""
    region, _ = make_region(32)
    slot = random_bytes(5, 32)
    whole = zlib.crc32(bytes(slot[:3].numpy()))
    slot[1, 5] ^= 1
    tail = Block(regions=[region], pages=torch.tensor([6, 1]), host=[slot[3:]], checksums=[whole], sealed=2)
    (_, total) = gather_blocks([tail], Verify.CRC32)
    assert total != zlib.crc32(bytes(slot.numpy()))


def test_scatter_of_what_gather_hashed_is_accepted() -> None:
    regions = [make_region(32, layer=layer, seed=layer)[0] for layer in (0, 1)]
    first, second = (make_block([region], [4, 2]) for region in regions)
    sums = gather_blocks([first, second], Verify.CRC32)
    checked = [
        Block(
            regions=block.regions, pages=torch.tensor([0, 1]), host=block.host, guarded=block.guarded, checksums=[value]
        )
        for block, value in zip((first, second), sums[1::2], strict=True)
    ]
    scatter_blocks(checked, Verify.CRC32)
    for region in regions:
        assert torch.equal(region.pages[[0, 1]], region.pages[[4, 2]])


def test_scatter_with_a_flipped_bit_writes_neither_that_block_nor_later_ones() -> None:
    parts = [make_region(32, layer=layer, seed=layer) for layer in (0, 1, 2)]
    blocks = []
    for region, _ in parts:
        fresh = make_block([region], [4, 2])
        blocks.append(make_block([region], [4, 2], before=checksum(fresh.guarded)))
    expected = checksum(blocks[1].guarded)
    blocks[1].host[0][1, 7] ^= 4
    found = checksum(blocks[1].guarded)
    before = [memory.clone() for _, memory in parts]
    with pytest.raises(ChecksumMismatch, match=rf"layer 1, plane 'k': .*{found:#010x}, expected {expected:#010x}"):
        scatter_blocks(blocks, Verify.CRC32)
    assert torch.equal(parts[0][1][[4, 2]], blocks[0].host[0])
    assert torch.equal(parts[1][1], before[1])
    assert torch.equal(parts[2][1], before[2])


def test_scatter_without_verify_does_not_look_at_checksums() -> None:
    region, memory = make_region(8)
    block = make_block([region], [1])
    assert scatter_blocks([block], Verify.NONE) == ()
    assert torch.equal(memory[[1]], block.host[0])


@pytest.mark.parametrize("stray", [-1, NUM_PAGES, 1 << 40])
@pytest.mark.parametrize("others", [[], [3, 5]])
def test_pages_outside_the_region_are_refused_by_number(stray: int, others: list[int]) -> None:
    region, _ = make_region(8, layer=3)
    with pytest.raises(ProtocolError, match=f"page {stray} of layer 3 is not below {NUM_PAGES}"):
        check_pages([region], torch.tensor([*others, stray]))


@pytest.mark.parametrize("pages", [torch.tensor([1], dtype=torch.int32), torch.tensor([[1]]), torch.tensor([True])])
def test_pages_of_another_dtype_or_shape_are_refused(pages: torch.Tensor) -> None:
    region, _ = make_region(8)
    with pytest.raises(ProtocolError, match=r"must be int64 \[n\]"):
        check_pages([region], pages)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (random_bytes(3, 8), "3 pages for 2 pages"),
        (random_bytes(2, 7), r"must be uint8 \[n, 8\]"),
        (random_bytes(2, 8).to(torch.int8), r"must be uint8 \[n, 8\]"),
        (random_bytes(16), r"must be uint8 \[n, 8\]"),
        (random_bytes(2, 9)[:, :8], "make it contiguous"),
    ],
)
def test_host_buffers_of_another_form_are_refused(host: torch.Tensor, message: str) -> None:
    region, _ = make_region(8)
    block = Block(regions=[region], pages=torch.tensor([1, 2]), host=[host], guarded=[host])
    with pytest.raises(ProtocolError, match=message):
        check_block(block, Verify.NONE)


def test_blocks_that_lack_a_buffer_are_refused() -> None:
    region, _ = make_region(8)
    block = make_block([region], [1, 2])
    with pytest.raises(ProtocolError, match="1 regions and 0 host"):
        check_block(Block(regions=[region], pages=block.pages, host=[], guarded=[]), Verify.NONE)
    unchecked = Block(regions=[region], pages=block.pages, host=block.host)
    check_block(unchecked, Verify.NONE)
    with pytest.raises(ProtocolError, match="1 regions and 0 checksums"):
        check_block(unchecked, Verify.CRC32)
