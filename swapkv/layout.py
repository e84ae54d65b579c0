"""What KV looks like in memory: planes of layers, layer groups, pages and chunks. Pure arithmetic.

A *plane* is one array of a layer that is paged (K, V, a fused KV, an MLA latent); at run time it becomes a *region*.
The data path copies planes by page and knows nothing else, so every attention layout is the same to it.
"""

from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from math import prod

import attrs

from swapkv.errors import ProtocolError
from swapkv.ids import GroupId, LayerId


class KVDtype(Enum):
    """An element type of KV, by its name and its size in bits."""

    FLOAT32 = ("float32", 32)
    FLOAT16 = ("float16", 16)
    BFLOAT16 = ("bfloat16", 16)
    FLOAT8_E4M3 = ("float8_e4m3fn", 8)
    FLOAT8_E5M2 = ("float8_e5m2", 8)
    INT8 = ("int8", 8)
    UINT8 = ("uint8", 8)

    @property
    def torch_name(self) -> str:
        """The attribute of `torch` that is this dtype."""
        return self.value[0]

    @property
    def bits(self) -> int:
        return self.value[1]


class PageOrder(Enum):
    """The order of the axes within a page: N tokens, H heads, D head_dim."""

    NHD = "NHD"
    HND = "HND"


class PlaneSplit(Enum):
    """Whether K and V are two planes a layer or one plane that holds both."""

    SPLIT = "split"
    FUSED = "fused"


@attrs.frozen(kw_only=True)
class Plane:
    """One paged array of one layer. `page_shape` is the shape of a page, `dtype` its element type."""

    name: str
    layer: LayerId
    page_shape: tuple[int, ...]
    dtype: KVDtype

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page of this plane."""
        return prod(self.page_shape) * self.dtype.bits // 8


@attrs.frozen(kw_only=True)
class LayerGroup:
    """Layers that share a page table. Tokens further back than `window` are never read again (None: all are)."""

    layers: tuple[LayerId, ...]
    window: int | None = None


def _positive(instance: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ProtocolError(f"{attribute.name}={value!r} must be a whole number of at least 1")


@attrs.frozen(kw_only=True)
class KVLayout:
    """The shape of a model's KV cache.

    `page_size`: tokens a page. `chunk_tokens`: tokens a chunk, a multiple of `page_size`. `groups` and `planes` name
    every layer exactly once (a layer may have several planes). `truncate_slack`: how many tokens `truncate` may take
    back in a windowed group; pages that close behind a window are kept.
    Raises `ProtocolError` for values that do not fit together.
    """

    page_size: int = attrs.field(validator=_positive)
    chunk_tokens: int = attrs.field(validator=_positive)
    groups: tuple[LayerGroup, ...]
    planes: tuple[tuple[Plane, ...], ...]
    truncate_slack: int = 0

    def __attrs_post_init__(self) -> None:
        if self.chunk_tokens % self.page_size:
            raise ProtocolError(
                f"chunk_tokens={self.chunk_tokens} must be a multiple of page_size={self.page_size}; "
                f"try {-(-self.chunk_tokens // self.page_size) * self.page_size}"
            )
        named = sorted(layer for group in self.groups for layer in group.layers)
        if not named or named != list(range(len(self.planes))):
            raise ProtocolError(f"groups name layers {named}, planes describe {len(self.planes)}: each layer goes once")
        for group in self.groups:
            if group.window is not None and group.window < 1:
                raise ProtocolError(f"window={group.window} must be at least 1 token, or None for full attention")
        if self.truncate_slack < 0:
            raise ProtocolError(f"truncate_slack={self.truncate_slack} must be 0 tokens or more")
        for index, planes in enumerate(self.planes):
            if not planes or any(plane.layer != index or plane.page_bytes < 1 for plane in planes):
                found = ", ".join(f"{p.name!r} of layer {p.layer} with pages of {p.page_bytes} bytes" for p in planes)
                raise ProtocolError(
                    f"layer {index} has the planes [{found}]: give it at least one, each of layer {index} and with pages of "
                    "at least 1 byte"
                )
            if len({plane.name for plane in planes}) < len(planes):
                raise ProtocolError(
                    f"layer {index} has planes of equal names, {[p.name for p in planes]}: give each a name of its own"
                )

    @classmethod
    def dense(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: KVDtype = KVDtype.BFLOAT16,
        page_size: int = 16,
        chunk_tokens: int = 256,
        order: PageOrder = PageOrder.NHD,
        split: PlaneSplit = PlaneSplit.SPLIT,
        value_head_dim: int | None = None,
        windows: Sequence[int | None] | None = None,
        truncate_slack: int = 0,
    ) -> "KVLayout":
        """Multi-head or grouped-query attention.

        Page shapes: `[page_size, num_kv_heads, head_dim]` (NHD) or `[num_kv_heads, page_size, head_dim]` (HND) for
        the planes "k" and "v"; with `FUSED` one plane "kv" with a leading axis of 2. `windows` gives each layer's
        sliding window in tokens, None for full attention; layers of equal window form a group.
        """
        value_dim = head_dim if value_head_dim is None else value_head_dim
        _require_at_least_1(
            num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, value_head_dim=value_dim
        )
        if split is PlaneSplit.FUSED and value_dim != head_dim:
            raise ProtocolError(
                f"a fused plane needs value_head_dim={value_dim} to equal head_dim={head_dim}; use SPLIT"
            )

        def page(dim: int) -> tuple[int, ...]:
            nhd = (page_size, num_kv_heads, dim)
            return nhd if order is PageOrder.NHD else (num_kv_heads, page_size, dim)

        def planes(layer: LayerId) -> tuple[Plane, ...]:
            if split is PlaneSplit.FUSED:
                return (Plane(name="kv", layer=layer, page_shape=(2, *page(head_dim)), dtype=dtype),)
            return (
                Plane(name="k", layer=layer, page_shape=page(head_dim), dtype=dtype),
                Plane(name="v", layer=layer, page_shape=page(value_dim), dtype=dtype),
            )

        return cls(
            page_size=page_size,
            chunk_tokens=chunk_tokens,
            groups=_groups_by_window(num_layers, windows),
            planes=tuple(planes(LayerId(layer)) for layer in range(num_layers)),
            truncate_slack=truncate_slack,
        )

    @classmethod
    def mla(
        cls,
        *,
        num_layers: int,
        latent_dim: int,
        rope_dim: int,
        dtype: KVDtype = KVDtype.BFLOAT16,
        page_size: int = 64,
        chunk_tokens: int = 256,
    ) -> "KVLayout":
        """Multi-head latent attention: one plane "latent" a layer, pages of `[page_size, latent_dim + rope_dim]`."""
        _require_at_least_1(num_layers=num_layers, latent_dim=latent_dim)
        if rope_dim < 0:
            raise ProtocolError(f"rope_dim={rope_dim} must be 0 or more")
        shape = (page_size, latent_dim + rope_dim)
        return cls(
            page_size=page_size,
            chunk_tokens=chunk_tokens,
            groups=_groups_by_window(num_layers, None),
            planes=tuple(
                (Plane(name="latent", layer=LayerId(layer), page_shape=shape, dtype=dtype),)
                for layer in range(num_layers)
            ),
        )

    @property
    def num_layers(self) -> int:
        return len(self.planes)

    @property
    def chunk_pages(self) -> int:
        """Pages a full chunk."""
        return self.chunk_tokens // self.page_size

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes a page takes in each layer, all planes of the layer together. Shape `[num_layers]`."""
        return tuple(sum(plane.page_bytes for plane in planes) for planes in self.planes)

    def page_bytes(self, group: GroupId) -> int:
        """Bytes a page takes in all layers of `group`."""
        return sum(self.layer_bytes[layer] for layer in self.groups[group].layers)

    def chunk_bytes(self, group: GroupId) -> int:
        """Bytes a full chunk of `group` takes: the size of its host slot."""
        return self.page_bytes(group) * self.chunk_pages

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of KV that one token takes over all layers."""
        return sum(self.layer_bytes) // self.page_size

    @cached_property
    def group_of_layer(self) -> tuple[GroupId, ...]:
        """The group of each layer. Shape `[num_layers]`."""
        owner = {layer: GroupId(g) for g, group in enumerate(self.groups) for layer in group.layers}
        return tuple(owner[LayerId(layer)] for layer in range(self.num_layers))

    def plane_offset(self, group: GroupId, plane: Plane) -> int:
        """Where `plane` begins in a host slot of `group`, in bytes: slots are layer-major, then plane by plane."""
        offset = 0
        for layer in self.groups[group].layers:
            for candidate in self.planes[layer]:
                if candidate is plane:
                    return offset
                offset += candidate.page_bytes * self.chunk_pages
        raise ProtocolError(
            f"plane {plane.name!r} of layer {plane.layer} is not in group {group}: ask for it with the group that "
            "group_of_layer names, and with the layout's own plane"
        )

    def plane_range(self, group: GroupId, low: int, high: int) -> slice:
        """Which of the group's planes, counted layer by layer, belong to its layers `[low, high)`."""
        counts = [len(self.planes[layer]) for layer in self.groups[group].layers]
        return slice(sum(counts[:low]), sum(counts[:high]))

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take in a group without a window."""
        return -(-tokens // self.page_size)

    def first_needed_page(self, group: GroupId, tokens: int) -> int:
        """The first logical page that a sequence of `tokens` tokens may still read in `group`."""
        window = self.groups[group].window
        if window is None:
            return 0
        return max(0, tokens - window - self.truncate_slack) // self.page_size

    def peak_pages(self, group: GroupId, tokens: int, step_tokens: int) -> int:
        """The most pages that a sequence holds in `group` while it grows to `tokens` by at most `step_tokens` a step."""
        window = self.groups[group].window
        if window is None:
            return self.pages_for(tokens)
        straddling = window + self.truncate_slack + step_tokens + self.page_size - 1
        return min(self.pages_for(tokens), self.pages_for(straddling))


def _require_at_least_1(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ProtocolError(f"{name}={value} must be at least 1")


def _groups_by_window(num_layers: int, windows: Sequence[int | None] | None) -> tuple[LayerGroup, ...]:
    if windows is None:
        windows = [None] * num_layers
    if len(windows) != num_layers:
        raise ProtocolError(f"windows has {len(windows)} entries for num_layers={num_layers}: give one a layer")
    by_window: dict[int | None, list[LayerId]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(LayerId(layer))
    return tuple(LayerGroup(layers=tuple(layers), window=window) for window, layers in by_window.items())
