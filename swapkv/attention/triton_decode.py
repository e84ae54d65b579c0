"""Decode attention over paged KV in one pass of a Triton kernel, which reads pages wherever their addresses point.

Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023): the keys of a sequence are cut into splits that separate programs
take, each with a softmax of its own, and a second kernel joins them by their log-sum-exps. As in `attend`, splits begin
at absolute multiples of `split_tokens` and merge from the newest to the oldest, so the bits know nothing of where pages
lie. The heads of a group (GQA) are the rows of one tile, so KV is read once for all of them.

Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported) runs the same kernels on CPU tensors, slowly:
for tests. It cannot multiply bfloat16, so there such tiles are widened to float32 first. Experimental: tests compile the
kernels for compute capability 8.0 and 9.0, and interpret them; no GPU has run them yet.
"""

from math import gcd

import attrs
import torch

from swapkv.attention.partial import LogBase, Partial, empty
from swapkv.errors import ProtocolError
from swapkv.layout import PageOrder

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("Triton kernels need an extra: pip install 'swapkv[triton]'") from error

MAX_HEAD_DIM = 256
"""A wider tile of keys does not fit the shared memory of today's GPUs beside one of values."""

_TILE_BYTES = 32 * 1024
"""Upper bound of one tile of keys or values: two of each, fetched ahead, fit the 160 KiB of an A100."""

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@attrs.frozen(kw_only=True)
class PageFormat:
    """What lies at the address of a page: a dense array `[page_size, num_kv_heads, D]` (NHD) or
    `[num_kv_heads, page_size, D]` (HND) of `dtype`, where D is that of the query for keys and `value_dim` for values.
    """

    page_size: int
    num_kv_heads: int
    value_dim: int
    dtype: torch.dtype
    order: PageOrder

    def __attrs_post_init__(self) -> None:
        if min(self.page_size, self.num_kv_heads) < 1:
            raise ProtocolError(f"page_size={self.page_size}, num_kv_heads={self.num_kv_heads} must be at least 1")
        if not 1 <= self.value_dim <= MAX_HEAD_DIM:
            raise ProtocolError(f"value_dim={self.value_dim} must be 1 to {MAX_HEAD_DIM}: use attend() for others")
        if self.dtype not in _TYPES:
            raise ProtocolError(f"KV of {self.dtype} is not among {[*_TYPES]}: convert it, or use attend()")


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    order: PageOrder,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    split_tokens: int = 256,
) -> Partial:
    """Attention of one new token a sequence over the KV of its sequence, which must hold its own KV already.

    `query`: `[B, Hq, D]`; query b stands at position p = `lengths[b]` - 1 and sees positions max(0, p - window + 1) … p,
    and below those also the first `sinks`. Query head h reads KV head h // (Hq / Hkv).
    `keys`, `values`: planes `[num_pages, page_size, Hkv, D]` (NHD) or `[num_pages, Hkv, page_size, D]` (HND), float32,
    float16 or bfloat16, each page dense; the last axis of `values` may differ (Dv). They lie on the query's device or
    in pinned host memory. `page_tables`: int64 `[B, max_pages]`, rows of the planes; anything (-1) where no query looks.
    `lengths`: int64 `[B]`, tokens of each sequence with its newest; 0 gives an empty row.
    `window`, `scale`, `softcap` as in `attend`. `split_tokens`: 1 or more, of which a program takes one run.
    Tables and lengths are checked where they are: give them on the CPU, or the check waits for the GPU.
    Returns out float32 `[B, Hq, Dv]`, natural lse `[B, Hq]` and count `[B]` on the query's device, not differentiable.
    Work goes to that device's current stream of torch. Scratch memory is splits · B · Hq · (Dv + 1) float32.
    Raises `ProtocolError` if shapes or numbers do not fit, if a query sees a page that is not there, or if the query is
    on the CPU while the kernels are compiled rather than interpreted.
    """
    if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
        found = f"keys {keys.dtype} {tuple(keys.shape)} and values {values.dtype} {tuple(values.shape)}"
        raise ProtocolError(f"{found} must have 4 axes and agree in dtype and in all axes but the last")
    for name, plane in (("keys", keys), ("values", values)):
        _check_plane(name, plane, query.device)
    num_pages, page_size, num_kv_heads = keys.shape[:3]
    if order is PageOrder.HND:
        page_size, num_kv_heads = num_kv_heads, page_size
    if query.ndim != 3 or query.shape[2] != keys.shape[3]:
        raise ProtocolError(f"query {tuple(query.shape)} must be [B, Hq, D], with the D of keys {tuple(keys.shape)}")
    form = PageFormat(
        page_size=page_size, num_kv_heads=num_kv_heads, value_dim=values.shape[3], dtype=keys.dtype, order=order
    )
    view = _View(lengths=lengths, window=window, sinks=sinks, scale=scale, softcap=softcap, split_tokens=split_tokens)
    seen = _seen(page_tables, "page_tables", view, page_size)
    absent = seen & ((page_tables < 0) | (page_tables >= num_pages))
    _refuse(absent, page_tables, f"not to one of the {num_pages} pages of the plane: restore it first")
    at = [(page_tables * (p.stride(0) * p.element_size()) + p.data_ptr()).where(seen, 0) for p in (keys, values)]
    return _launch(query, at[0], at[1], view, form)


def decode_at(
    query: torch.Tensor,
    keys_at: torch.Tensor,
    values_at: torch.Tensor,
    lengths: torch.Tensor,
    *,
    form: PageFormat,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    split_tokens: int = 256,
) -> Partial:
    """`decode` over pages that lie anywhere, each at an address of its own; the same bits for the same KV.

    `keys_at`, `values_at`: int64 `[B, max_pages]`, the address in bytes of each page of `form`; anything (0) where no
    query looks. An address must be readable from the query's device: its own memory, or pinned host memory, which CUDA
    maps at the same address (unified virtual addressing) and the kernel then reads in place, over the bus. The caller
    keeps that memory alive and unchanged until the work is done. All else as in `decode`.
    Raises `ProtocolError` if shapes or numbers do not fit, or if the address of a page that a query sees is not
    positive or not a multiple of the element size; whether memory lies there cannot be checked.
    """
    view = _View(lengths=lengths, window=window, sinks=sinks, scale=scale, softcap=softcap, split_tokens=split_tokens)
    if keys_at.shape != values_at.shape:
        raise ProtocolError(f"keys_at {tuple(keys_at.shape)} and values_at {tuple(values_at.shape)} must agree")
    seen = _seen(keys_at, "keys_at", view, form.page_size) & _seen(values_at, "values_at", view, form.page_size)
    for table in (keys_at, values_at):
        wrong = seen & ((table <= 0) | (table % form.dtype.itemsize != 0))
        _refuse(wrong, table, f"not to a positive multiple of {form.dtype.itemsize} bytes: give the address of a page")
    return _launch(query, keys_at.where(seen, 0), values_at.where(seen, 0), view, form)


@attrs.frozen(kw_only=True, eq=False)
class _View:
    """What each query sees and how it weighs it. Tensors are int64 `[B]`, where `lengths` are."""

    lengths: torch.Tensor
    window: int | None
    sinks: int
    scale: float | None
    softcap: float | None
    split_tokens: int
    first: torch.Tensor = attrs.field(init=False)
    sink_end: torch.Tensor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.lengths.ndim != 1 or self.lengths.dtype != torch.int64:
            raise ProtocolError(f"lengths is {self.lengths.dtype} {tuple(self.lengths.shape)}: give int64 [B]")
        if self.window is not None and self.window < 1:
            raise ProtocolError(f"window={self.window} must be at least 1 token, or None for full attention")
        if self.sinks < 0:
            raise ProtocolError(f"sinks={self.sinks} must be 0 tokens or more")
        if self.softcap is not None and self.softcap <= 0:
            raise ProtocolError(f"softcap={self.softcap} must be above 0, or None for no cap")
        if self.split_tokens < 1:
            raise ProtocolError(f"split_tokens={self.split_tokens} must be at least 1; try 256")
        first = (self.lengths - (self.lengths if self.window is None else self.window)).clamp(min=0)
        object.__setattr__(self, "first", first)
        object.__setattr__(self, "sink_end", first.clamp(max=self.sinks))

    def plan(self) -> torch.Tensor:
        """What a program must know of its sequence, int32 `[B, 5]`: length, first position of the window, end of the
        sinks below it, and how many splits belong to the window and how many more to the sinks alone.
        """
        size = self.split_tokens
        oldest = self.first // size
        near = (self.lengths - 1) // size - oldest + 1
        far = torch.minimum((self.sink_end + size - 1) // size, oldest)
        return torch.stack([self.lengths, self.first, self.sink_end, near, far], 1).int()


def _seen(table: torch.Tensor, name: str, view: _View, page_size: int) -> torch.Tensor:
    """Which pages any query reads, bool `[B, max_pages]`."""
    batch = len(view.lengths)
    if table.ndim != 2 or table.dtype != torch.int64 or len(table) != batch or table.device != view.lengths.device:
        found = f"{name} is {table.dtype} {tuple(table.shape)} on {table.device}"
        raise ProtocolError(f"{found}: give int64 [{batch}, max_pages] where lengths are, on {view.lengths.device}")
    room = table.shape[1] * page_size
    wrong = ((view.lengths < 0) | (view.lengths > room)).nonzero()
    if len(wrong):
        row = int(wrong[0, 0])
        found = f"lengths[{row}]={int(view.lengths[row])}"
        raise ProtocolError(f"{found} must be 0 to {room}, the tokens of {table.shape[1]} pages: widen {name}")
    begins = torch.arange(0, room, page_size, device=table.device)
    in_window = (begins < view.lengths[:, None]) & (begins + page_size > view.first[:, None])
    return in_window | (begins < view.sink_end[:, None])


def _refuse(wrong: torch.Tensor, table: torch.Tensor, remedy: str) -> None:
    """Raise for the first page that is needed and wrong, bool `[B, max_pages]`."""
    found = wrong.nonzero()
    if len(found):
        row, logical = found[0].tolist()
        page = f"logical page {logical} of sequence {row}"
        raise ProtocolError(f"{page} is needed but maps to {int(table[row, logical])}, {remedy}")


def _check_plane(name: str, plane: torch.Tensor, device: torch.device) -> None:
    if plane.shape[0] and not plane[0].is_contiguous():
        raise ProtocolError(f"the pages of {name} have strides {plane.stride()[1:]}: each must be dense; copy them")
    if plane.device != device and not plane.is_pinned():
        raise ProtocolError(f"{name} is on {plane.device}, the query on {device}: move it there, or into pinned memory")


def _check_query(query: torch.Tensor, view: _View, form: PageFormat) -> None:
    batch = len(view.lengths)
    if query.ndim != 3 or query.shape[0] != batch or query.dtype not in _TYPES or query.shape[1] % form.num_kv_heads:
        raise ProtocolError(
            f"query {query.dtype} {tuple(query.shape)} must be [B, Hq, D] with B the number of lengths ({batch}) and Hq a "
            f"multiple of the {form.num_kv_heads} KV heads, in one of {[*_TYPES]}"
        )
    if not 1 <= query.shape[2] <= MAX_HEAD_DIM:
        raise ProtocolError(f"head_dim={query.shape[2]} must be 1 to {MAX_HEAD_DIM}: use attend() for others")
    if query.device.type == "cpu" and not _interpreted():
        raise ProtocolError("query is on the CPU, where Triton only interprets: use attend() or set TRITON_INTERPRET=1")


def _interpreted() -> bool:
    return not isinstance(_attend_split, triton.JITFunction)


def _launch(
    query: torch.Tensor, keys_at: torch.Tensor, values_at: torch.Tensor, view: _View, form: PageFormat
) -> Partial:
    """Both kernels, over addresses that are checked, and 0 where no query looks."""
    _check_query(query, view, form)
    batch, num_heads, head_dim = query.shape
    plan, device = view.plan(), query.device
    num_splits = int(plan[:, 3:].sum(1).max()) if batch else 0
    if not num_splits:
        return empty(batch, num_heads, form.value_dim, device=device)
    outs = torch.empty(num_splits, batch, num_heads, form.value_dim, device=device)
    lses = torch.empty(num_splits, batch, num_heads, device=device)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    scale = head_dim**-0.5 if view.scale is None else float(view.scale)
    alignment = gcd(16, (head_dim | form.value_dim) * form.dtype.itemsize)
    if bool(((keys_at | values_at) % alignment).any()):
        alignment = form.dtype.itemsize
    constants = _constants(query, view, form, alignment)
    inputs = [table.to(device, non_blocking=True) for table in (keys_at, values_at, plan)]
    rows, max_pages, grid = query.detach().contiguous(), keys_at.shape[1], (num_splits, form.num_kv_heads, batch)
    with torch.cuda.device_of(query):
        _attend_split[grid](rows, *inputs, outs, lses, scale, max_pages, **constants, num_stages=2)
        width = triton.next_power_of_2(form.value_dim)
        _merge_splits[(num_heads, batch)](outs, lses, inputs[2], out, lse, value_dim=form.value_dim, width=width)
    count = view.lengths - view.first + view.sink_end
    return Partial(out=out, lse=lse, count=count.to(device), base=LogBase.NATURAL)


def _constants(query: torch.Tensor, view: _View, form: PageFormat, alignment: int) -> dict[str, object]:
    """What `_attend_split` is compiled for. A matrix product takes no side shorter than 16.

    `alignment`: bytes, a divisor of every row's address. At 16 the compiled kernel reads 16 bytes at once.
    """
    group, head_dim = query.shape[1] // form.num_kv_heads, query.shape[2]
    key_width, value_width = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, form.value_dim))
    fitting = _TILE_BYTES // (max(key_width, value_width) * form.dtype.itemsize)
    native = tl.float32 if _interpreted() and form.dtype is torch.bfloat16 else _TYPES[form.dtype]
    return {
        "softcap": view.softcap,
        "alignment": alignment,
        "group": group,
        "head_dim": head_dim,
        "value_dim": form.value_dim,
        "split_tokens": view.split_tokens,
        "page_size": form.page_size,
        "heads_first": form.order is PageOrder.HND,
        "rows": max(16, triton.next_power_of_2(group)),
        "block": max(16, min(64, fitting, triton.next_power_of_2(view.split_tokens))),
        "key_width": key_width,
        "value_width": value_width,
        "stored": _TYPES[form.dtype],
        "key_type": native if query.dtype is form.dtype else tl.float32,
        "value_type": native,
    }


@triton.jit
def _attend_split(
    query,
    keys_at,
    values_at,
    plan,
    outs,
    lses,
    scale,
    max_pages,
    softcap: tl.constexpr,
    alignment: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    split_tokens: tl.constexpr,
    page_size: tl.constexpr,
    heads_first: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    stored: tl.constexpr,
    key_type: tl.constexpr,
    value_type: tl.constexpr,
):
    """The heads of one group over one split. Split 0 is the newest; those of sinks alone follow the window's."""
    number, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_kv_heads, batch = tl.num_programs(1), tl.num_programs(2)
    plan += sequence * 5
    length, first, sink_end = tl.load(plan), tl.load(plan + 1), tl.load(plan + 2)
    near, far = tl.load(plan + 3), tl.load(plan + 4)
    if number >= near + far:
        return
    in_window = number < near
    low = tl.where(in_window, (length - 1) // split_tokens - number, near + far - 1 - number) * split_tokens
    high = tl.minimum(low + split_tokens, tl.where(in_window, length, sink_end))
    row, key_axis, value_axis = tl.arange(0, rows), tl.arange(0, key_width), tl.arange(0, value_width)
    heads = (sequence * num_kv_heads + kv_head) * group + row
    real = (row < group)[:, None] & (key_axis < head_dim)[None, :]
    rows_of_query = tl.load(query + heads[:, None] * head_dim + key_axis[None, :], mask=real, other=0.0).to(key_type)
    top, total = tl.full([rows], float("-inf"), tl.float32), tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, value_width], tl.float32)
    # All blocks of the split, at absolute multiples too: one that shows nothing loads nothing and changes no bit.
    for begin in range(0, split_tokens, block):
        position = low + begin + tl.arange(0, block)
        seen = (position < high) & ((position >= first) | (position < sink_end))
        page, slot = sequence * max_pages + position // page_size, position % page_size
        index = kv_head * page_size + slot if heads_first else slot * num_kv_heads + kv_head
        key = _load(keys_at + page, index, seen, head_dim, key_width, stored, alignment).to(key_type)
        scores = tl.dot(rows_of_query, tl.trans(key), input_precision="ieee") * scale
        if softcap is not None:
            scores = _tanh(scores / softcap) * softcap
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A block that shows nothing before any that does leaves the top at -inf, from which nothing can be subtracted.
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights, fade = tl.exp(scores - pivot[:, None]), tl.exp(top - pivot)
        value = _load(values_at + page, index, seen, value_dim, value_width, stored, alignment).to(value_type)
        total = total * fade + tl.sum(weights, 1)
        coarse = weights.to(value_type)
        acc = tl.dot(coarse, value, acc * fade[:, None], input_precision="ieee")
        if value_type != tl.float32:  # what rounding took from the weights goes through a second product
            acc = tl.dot((weights - coarse.to(tl.float32)).to(value_type), value, acc)
        top = new_top
    heads += number.to(tl.int64) * batch * num_kv_heads * group
    wanted = (row < group)[:, None] & (value_axis < value_dim)[None, :]
    tl.store(outs + heads[:, None] * value_dim + value_axis[None, :], acc / total[:, None], mask=wanted)
    tl.store(lses + heads, top + tl.log(total), mask=row < group)


@triton.jit
def _load(pages_at, index, seen, dim: tl.constexpr, width: tl.constexpr, stored: tl.constexpr, alignment: tl.constexpr):
    """Row `index` of `dim` elements in each page, `[block, width]`. What is not seen is 0 and not loaded: a stale NaN
    would survive even a weight of 0.
    """
    at = tl.load(pages_at, mask=seen, other=0).to(tl.pointer_type(stored))
    axis = tl.arange(0, width)
    at = tl.multiple_of(at + index * dim, alignment)[:, None] + axis[None, :]
    return tl.load(at, mask=seen[:, None] & (axis < dim)[None, :], other=0.0)


@triton.jit
def _tanh(x):
    """Triton has none of its own. By exp alone, tanh near 0 would be a difference of equals; there a series stands in."""
    fall = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - fall) / (1.0 + fall)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0, -far, far))


@triton.jit
def _merge_splits(outs, lses, plan, out, lse, value_dim: tl.constexpr, width: tl.constexpr):
    """One head of one sequence: its splits from the newest to the oldest. No split leaves out 0 and lse -inf."""
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_heads, batch = tl.num_programs(0), tl.num_programs(1)
    num_splits = tl.load(plan + sequence * 5 + 3) + tl.load(plan + sequence * 5 + 4)
    axis, row = tl.arange(0, width), sequence * num_heads + head
    source, step = row, batch.to(tl.int64) * num_heads
    top, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    acc = tl.zeros([width], tl.float32)
    while num_splits > 0:
        part = tl.load(lses + source)
        new_top = tl.maximum(top, part)
        fade, share = tl.exp(top - new_top), tl.exp(part - new_top)
        acc = acc * fade + tl.load(outs + source * value_dim + axis, mask=axis < value_dim, other=0.0) * share
        total = total * fade + share
        top = new_top
        source += step
        num_splits -= 1
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(out + row * value_dim + axis, acc / divisor, mask=axis < value_dim)
    tl.store(lse + row + tl.arange(0, 1), top + tl.log(divisor))
