"""The Triton decode kernel, by Triton's interpreter on the CPU, against a dense float64 reference and `attend`.

Triton decides for a whole process, as it is imported, whether kernels are interpreted, and transformers imports it too.
So kernels run in a process of their own, to which each test sends what to compute. A second such process compiles them
for GPUs that this machine need not have: the compiler refuses some of what the interpreter lets pass.
"""

import os
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from math import ceil
from multiprocessing import get_context

import attrs
import pytest
import torch

from swapkv.attention import attend, empty, write_pages
from swapkv.errors import ProtocolError
from swapkv.layout import PageOrder

MODULE = "swapkv.attention.triton_decode"

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

ERROR_MAX = 3e-6
"""Bound on |out - float64 reference| and the same of lse, with keys, values and queries drawn from N(0, 1), whatever
their dtype: the reference takes the same rounded numbers, the kernel adds in float32 and loses no bit of a weight.
"""


def remote(environment):
    """A function that calls functions of this module in another process, where `environment` precedes triton.

    Tensors go there and back as plain bytes, not as shared memory.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=prepare, initargs=(environment,)) as pool:
        yield lambda *call: pickle.loads(pool.submit(serve, pickle.dumps(call)).result())


def prepare(environment):
    assert "triton" not in sys.modules
    os.environ.update(environment)
    torch.set_num_threads(1)


def serve(packed):
    function, *args = pickle.loads(packed)
    return pickle.dumps(function(import_module(MODULE), *args))


@pytest.fixture(scope="module")
def interpreter():
    yield from remote({"TRITON_INTERPRET": "1"})


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    yield from remote({"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))})


class Batch:
    """KV of several sequences, dense and in pages, and a query for each. All that belongs to no token is NaN."""

    def __init__(
        self,
        *lengths,
        group=2,
        num_kv_heads=2,
        head_dim=16,
        value_dim=None,
        page_size=4,
        order=PageOrder.NHD,
        dtype=torch.float32,
        query_dtype=None,
        placement=0,
        spare=3,
    ):
        torch.manual_seed(0)
        self.order, self.page_size, self.lengths = order, page_size, torch.tensor(lengths, dtype=torch.int64)
        value_dim = value_dim or head_dim
        self.dense = [
            tuple(torch.randn(length, num_kv_heads, dim).to(dtype) for dim in (head_dim, value_dim))
            for length in lengths
        ]
        self.query = torch.randn(len(lengths), num_kv_heads * group, head_dim).to(query_dtype or dtype)
        needed = [ceil(length / page_size) for length in lengths]
        self.tables = torch.full((len(lengths), max(needed, default=0) + 1), -1)
        torch.manual_seed(1000 + placement)
        rows = iter(torch.randperm(sum(needed) + spare).tolist())
        for table, pages in zip(self.tables, needed, strict=True):
            table[:pages] = torch.tensor([next(rows) for _ in range(pages)])

        def plane(dim):
            shape = (page_size, num_kv_heads, dim) if order is PageOrder.NHD else (num_kv_heads, page_size, dim)
            return torch.full((sum(needed) + spare, *shape), torch.nan, dtype=dtype)

        self.keys, self.values = plane(head_dim), plane(value_dim)
        for (keys, values), table in zip(self.dense, self.tables, strict=True):
            write_pages(self.keys, keys, table, 0, order)
            write_pages(self.values, values, table, 0, order)

    @property
    def form(self):
        return {
            "page_size": self.page_size,
            "num_kv_heads": self.dense[0][0].shape[1],
            "value_dim": self.values.shape[3],
            "dtype": self.keys.dtype,
            "order": self.order,
        }


def decode(module, batch, options):
    return module.decode(
        batch.query, batch.keys, batch.values, batch.tables, batch.lengths, order=batch.order, **options
    )


def decode_at(module, batch, options):
    """Every page in an allocation of its own."""
    form = module.PageFormat(**batch.form)
    planes = [[page.clone() for page in plane] for plane in (batch.keys, batch.values)]
    addresses = [torch.tensor([page.data_ptr() for page in pages])[batch.tables] for pages in planes]
    return module.decode_at(batch.query, *addresses, batch.lengths, form=form, **options)


def decode_at_addresses(module, batch, keys_at, values_at):
    return module.decode_at(batch.query, keys_at, values_at, batch.lengths, form=module.PageFormat(**batch.form))


def reference(query, keys, values, *, window=None, sinks=0, scale=None, softcap=None, split_tokens=None):
    """Attention in float64 of `[Hq, D]`, the newest token's, over dense `[tokens, Hkv, D]`: out, lse and count."""
    group = query.shape[0] // keys.shape[1]
    keys, values = (dense.double().repeat_interleave(group, 1) for dense in (keys, values))
    scores = torch.einsum("hd,shd->hs", query.double(), keys) * (query.shape[1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(len(keys))
    seen = (position >= len(keys) - (window or len(keys))) | (position < sinks)
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hs,shd->hd", scores.softmax(-1), values), scores.logsumexp(-1), int(seen.sum())


def assert_exact(partial, batch, **options):
    for row, (keys, values) in enumerate(batch.dense):
        if not len(keys):
            nothing = empty(1, *partial.out.shape[1:])
            assert torch.equal(partial.out[row], nothing.out[0])
            assert torch.equal(partial.lse[row], nothing.lse[0])
            assert partial.count[row] == 0
            continue
        out, lse, count = reference(batch.query[row], keys, values, **options)
        assert partial.count[row] == count
        assert (partial.out[row] - out).abs().max() < ERROR_MAX
        assert (partial.lse[row] - lse).abs().max() < ERROR_MAX


def assert_same_bits(left, right):
    for ours, theirs in zip(attrs.astuple(left, recurse=False), attrs.astuple(right, recurse=False), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours is theirs


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_decode_any_group_and_order_equals_dense(interpreter, group, order):
    batch = Batch(0, 1, 19, 33, group=group, order=order)
    options = {"split_tokens": 16}
    assert_exact(interpreter(decode, batch, options), batch, **options)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("split_tokens", [4, 16, 64])
def test_decode_pages_and_splits_of_any_size_equal_dense_and_attend(interpreter, page_size, split_tokens):
    batch = Batch(21, 16, 1, 0, page_size=page_size)
    partial = interpreter(decode, batch, {"split_tokens": split_tokens})
    assert_exact(partial, batch)
    for row, length in enumerate(batch.lengths.tolist()):
        if length:
            query = batch.query[row : row + 1]
            out = attend(query, batch.keys, batch.values, batch.tables[row], length - 1, order=batch.order)
            assert (partial.out[row] - out[0]).abs().max() < 2 * ERROR_MAX


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 24), (32, 16), (80, 64), (96, 128), (256, 256)])
def test_decode_any_head_dim_equals_dense(interpreter, head_dim, value_dim, order):
    batch = Batch(3, 18, num_kv_heads=1, head_dim=head_dim, value_dim=value_dim, order=order)
    assert_exact(interpreter(decode, batch, {"split_tokens": 16}), batch)


@pytest.mark.parametrize("sinks", [0, 6, 40])
@pytest.mark.parametrize("window", [1, 3, 17, 100])
def test_decode_window_and_sinks_equal_dense(interpreter, window, sinks):
    batch = Batch(45, 2, 0, num_kv_heads=1)
    options = {"window": window, "sinks": sinks}
    for split_tokens in (8, 64):
        assert_exact(interpreter(decode, batch, {"split_tokens": split_tokens, **options}), batch, **options)


@pytest.mark.parametrize("window", [None, 10, 80])
def test_decode_splits_of_several_blocks_equal_dense(interpreter, window):
    """A block takes 64 tokens at most; the first of a split may show nothing."""
    batch = Batch(150, 120, num_kv_heads=1)
    assert_exact(interpreter(decode, batch, {"window": window, "split_tokens": 128}), batch, window=window)


@pytest.mark.parametrize("options", [{"softcap": 0.5}, {"softcap": 30.0}, {"scale": 0.7, "softcap": 2.0}])
def test_decode_softcap_and_scale_equal_dense(interpreter, options):
    batch = Batch(37, 4)
    assert_exact(interpreter(decode, batch, {"split_tokens": 16, **options}), batch, **options)


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("query_dtype", [None, torch.float32])
def test_decode_half_precision_loses_nothing_but_the_rounding_of_float32(interpreter, dtype, query_dtype, order):
    batch = Batch(37, 1, 0, dtype=dtype, query_dtype=query_dtype, order=order)
    assert_exact(interpreter(decode, batch, {"split_tokens": 16}), batch)


def test_decode_scores_of_a_thousand_do_not_overflow(interpreter):
    batch = Batch(37)
    batch.query *= 400
    partial = interpreter(decode, batch, {"split_tokens": 16})
    out, lse, _ = reference(batch.query[0], *batch.dense[0])
    assert (partial.out[0] - out).abs().max() < 1e-3
    assert (partial.lse[0] - lse).abs().max() < 1e-3


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("options", [{}, {"window": 21, "sinks": 3}])
def test_decode_pages_placed_elsewhere_gives_equal_bits(interpreter, order, options):
    lengths, options = (37, 1, 0, 20), {"split_tokens": 16, **options}
    partials = [
        interpreter(function, Batch(*lengths, order=order, placement=placement, spare=spare), options)
        for function, placement, spare in ((decode, 0, 3), (decode, 1, 20), (decode_at, 2, 3))
    ]
    for partial in partials[1:]:
        assert_same_bits(partial, partials[0])


def test_decode_fused_planes_give_equal_bits(interpreter):
    batch = Batch(37, 5)
    expected = interpreter(decode, batch, {})
    fused = torch.stack([batch.keys, batch.values], 1)
    batch.keys, batch.values = fused[:, 0], fused[:, 1]
    assert not batch.keys.is_contiguous()
    assert_same_bits(interpreter(decode, batch, {}), expected)


def test_decode_row_alone_gives_the_bits_it_has_in_a_batch(interpreter):
    options = {"split_tokens": 16}
    batch = Batch(70, 20, 3)
    together = interpreter(decode, batch, options)
    for row in range(3):
        alone = Batch(70, 20, 3)
        alone.query, alone.tables, alone.lengths = (
            tensor[row : row + 1] for tensor in (batch.query, batch.tables, batch.lengths)
        )
        partial = interpreter(decode, alone, options)
        assert torch.equal(partial.out[0], together.out[row])
        assert torch.equal(partial.lse[0], together.lse[row])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("function", [decode, decode_at])
def test_decode_stale_bytes_never_enter_the_arithmetic(interpreter, function, poison):
    options = {"window": 10, "sinks": 2, "split_tokens": 16}
    batch = Batch(39, 21)
    expected = interpreter(function, batch, options)
    for table, length in zip(batch.tables, batch.lengths.tolist(), strict=True):
        for position in range(-(-length // 4) * 4):
            if not (position < 2 or length - 10 <= position < length):
                batch.keys[table[position // 4], position % 4] = poison
                batch.values[table[position // 4], position % 4] = poison
    assert_same_bits(interpreter(function, batch, options), expected)


def test_decode_pages_between_sinks_and_window_may_be_absent(interpreter):
    batch = Batch(39)
    options = {"window": 10, "sinks": 2, "split_tokens": 16}
    expected = interpreter(decode, batch, options)
    batch.tables[0, 1:7] = -1
    assert_same_bits(interpreter(decode, batch, options), expected)
    with pytest.raises(ProtocolError, match=r"logical page 6 of sequence 0 .* maps to -1"):
        interpreter(decode, batch, {**options, "window": 12})
    with pytest.raises(ProtocolError, match="logical page 1 of sequence 0 "):
        interpreter(decode, batch, {**options, "sinks": 5})


def test_decode_no_sequence_or_no_token_gives_empty_rows(interpreter):
    batch = Batch(7)
    batch.query, batch.tables, batch.lengths = batch.query[:0], batch.tables[:0], batch.lengths[:0]
    assert_same_bits(interpreter(decode, batch, {}), empty(0, 4, 16))
    assert_same_bits(interpreter(decode, Batch(0, 0), {}), empty(2, 4, 16))


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({}, {"window": 0}, "window=0"),
        ({}, {"sinks": -1}, "sinks=-1"),
        ({}, {"softcap": 0.0}, r"softcap=0\.0"),
        ({}, {"split_tokens": 0}, "split_tokens=0"),
        ({"lengths": torch.tensor([-1, 2])}, {}, r"lengths\[0\]=-1"),
        ({"lengths": torch.tensor([3, 13])}, {}, r"lengths\[1\]=13 must be 0 to 12"),
        ({"lengths": torch.tensor([3, 12])}, {}, "logical page 0 of sequence 1 .* maps to 99"),
        ({"lengths": torch.tensor([3, 2]).int()}, {}, "lengths is torch.int32"),
        ({"lengths": torch.tensor([3])}, {}, "page_tables is torch.int64"),
        ({"tables": torch.zeros(2, 3)}, {}, "page_tables is torch.float32"),
        ({"query": torch.zeros(2, 3, 16)}, {}, "multiple of the 2 KV heads"),
        ({"query": torch.zeros(2, 4, 8)}, {}, "with the D of keys"),
        ({"query": torch.zeros(2, 4, 16).double()}, {}, "query torch.float64"),
        ({"keys": torch.zeros(5, 4, 2, 16).double()}, {}, "agree in dtype"),
        ({"values": torch.zeros(4, 4, 2, 16)}, {}, "agree in dtype and in all axes but the last"),
        ({"values": torch.zeros(5, 4, 2, 300)}, {}, "value_dim=300 must be 1 to 256"),
        ({"values": torch.zeros(5, 2, 4, 16).transpose(1, 2)}, {}, "pages of values have strides"),
    ],
)
def test_decode_what_does_not_fit_is_refused(interpreter, changed, options, message):
    batch = Batch(3, 2)
    assert batch.keys.shape == (5, 4, 2, 16)
    batch.tables = torch.tensor([[0, 1, 2], [99, 99, 99]])
    batch.lengths = torch.tensor([3, 0])
    for name, value in changed.items():
        setattr(batch, name, value)
    with pytest.raises(ProtocolError, match=message):
        interpreter(decode, batch, options)


def test_decode_at_addresses_that_cannot_be_pages_are_refused(interpreter):
    batch = Batch(3)
    for bad in (0, -64, 4098):
        with pytest.raises(ProtocolError, match=f"logical page 0 of sequence 0 .* maps to {bad}"):
            interpreter(decode_at_addresses, batch, torch.tensor([[64]]), torch.tensor([[bad]]))
    with pytest.raises(ProtocolError, match="must agree"):
        interpreter(decode_at_addresses, batch, torch.tensor([[64]]), torch.tensor([[64, 64]]))


def test_decode_query_on_the_cpu_without_the_interpreter_is_refused(compiler):
    with pytest.raises(ProtocolError, match="set TRITON_INTERPRET=1"):
        compiler(decode, Batch(3), {})


def test_import_without_triton_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(ImportError, match=r"swapkv\[triton\]"):
        import_module(MODULE)


def compile_for(module, capability, head_dim, group, dtype, softcap):
    """The PTX of the split kernel and the bytes of shared memory it takes; the merging kernel must compile too."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def build(kernel, types, constants, **options):
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        aligned = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(signature.values()) if kind[0] == "*"}
        source = ASTSource(kernel, signature, constants, aligned)
        return compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)

    lengths = torch.ones(1, dtype=torch.int64)
    view = module._View(lengths=lengths, window=None, sinks=0, scale=None, softcap=softcap, split_tokens=256)
    form = module.PageFormat(page_size=16, num_kv_heads=2, value_dim=head_dim, dtype=dtype, order=PageOrder.HND)
    constants = module._constants(torch.zeros(1, 2 * group, head_dim, dtype=dtype), view, form, 16)
    scratch = {"outs": "*fp32", "lses": "*fp32", "plan": "*i32"}
    stored = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]
    types = {"query": stored, "keys_at": "*i64", "values_at": "*i64", **scratch, "scale": "fp32", "max_pages": "i32"}
    kernel = build(module._attend_split, types, constants, num_stages=2)
    widths = {"value_dim": head_dim, "width": constants["value_width"]}
    build(module._merge_splits, {**scratch, "out": "*fp32", "lse": "*fp32"}, widths)
    return kernel.asm["ptx"], kernel.metadata.shared


@pytest.mark.parametrize(
    ("capability", "head_dim", "group", "dtype", "softcap"),
    [
        (80, 64, 4, torch.bfloat16, None),
        (80, 256, 1, torch.bfloat16, 30.0),
        (90, 256, 8, torch.float16, 30.0),
        (90, 96, 2, torch.float32, None),
    ],
)
def test_kernels_compile_for_gpus_and_read_16_bytes_at_once(compiler, capability, head_dim, group, dtype, softcap):
    ptx, shared = compiler(compile_for, capability, head_dim, group, dtype, softcap)
    assert shared <= 99 * 1024
    assert "cp.async.cg" in ptx  # the form that takes 16 bytes only
    assert "ld.global.b16" not in ptx
    assert dtype is torch.float32 or "mma.sync" in ptx
