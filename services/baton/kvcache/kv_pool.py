"""The tensors behind the page ids: one allocation, page-first, which each KV group reads in its own way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from baton.kvcache.kv_groups import KvGroup, divide_layers
from baton.layers.cache_spec import STATE_ITEMSIZE, CacheSpec, State

MOST_TOKENS = 1024
"""Tokens of a page whose size nobody names."""


def default_page_size(device: torch.device, specs: Sequence[CacheSpec] = (), itemsize: int = 2) -> int:
    """Tokens per page where none are named: on a GPU as many as attention kernels load at a time. `specs`: of
    each layer; more tokens where the keys and values of all layers together, of `itemsize` bytes a number,
    would take less of a page than a layer's state does."""
    size = 16 if device.type == "cpu" else 128
    states = [spec for spec in specs if isinstance(spec, State)]
    values = sum(spec.values for spec in specs if not isinstance(spec, State))
    while states and size < MOST_TOKENS and max(s.room(size, itemsize) for s in states) > values:
        size *= 2
    return size


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What the bytes of a KV group's page mean: [kv head, layer, part, token, dim], contiguous. So a range of
    heads is one piece of a page."""

    num_layers: int
    """Layers that a page has room for; the group may have fewer."""
    num_kv_heads: int
    head_dim: int
    page_size: int
    """Tokens per page."""
    dtype: torch.dtype
    parts: int = 2
    """2: keys and values; 1: latents, of which both are made."""

    @property
    def bytes_per_token_per_layer(self) -> int:
        """Bytes of all parts together."""
        return self.parts * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.page_size * self.bytes_per_token_per_layer


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What the bytes of a state group's page mean: the float32 numbers of each layer's tensors, contiguous,
    one tensor behind the other."""

    num_layers: int
    """Layers that a page has room for; the group may have fewer."""
    shapes: tuple[tuple[int, ...], ...]
    page_size: int
    """Tokens per page."""
    page_bytes: int
    axes: tuple[int, ...] = ()
    """Axis of each tensor that ranks divide among them; empty: they cannot."""
    dtype: torch.dtype = torch.float32

    @property
    def bytes_per_token_per_layer(self) -> int:
        """Bytes of a token in a layer's part of a page, rounded up."""
        return -(-sum(map(math.prod, self.shapes)) * STATE_ITEMSIZE // self.page_size)

    def divided(self, ranks: int) -> StateLayout:
        """The part of one of so many ranks, which divide the axes evenly."""
        if ranks == 1:
            return self
        shapes = []
        for shape, axis in zip(self.shapes, self.axes, strict=True):
            assert shape[axis] % ranks == 0
            shapes.append((*shape[:axis], shape[axis] // ranks, *shape[axis + 1 :]))
        return replace(self, shapes=tuple(shapes), page_bytes=self.page_bytes // ranks)


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """What the pages of a pool hold: as many bytes in all groups."""

    groups: tuple[KvGroup, ...]
    layouts: tuple[KvLayout, ...]
    """One of each group but those of states, which come last."""
    states: tuple[StateLayout, ...] = ()
    """One of each group of states."""

    @classmethod
    def of(cls, specs: Sequence[CacheSpec], page_size: int, dtype: torch.dtype) -> PoolLayout:
        """`specs`: of each layer."""
        groups, size = divide_layers(specs, page_size, dtype.itemsize)
        layouts: list[KvLayout] = []
        states: list[StateLayout] = []
        for spec in (group.spec for group in groups):
            fit = size // spec.room(page_size, dtype.itemsize)
            if isinstance(spec, State):
                bytes_ = size * page_size * dtype.itemsize
                states.append(StateLayout(fit, spec.shapes, page_size, bytes_, spec.axes))
            else:
                layouts.append(KvLayout(fit, spec.heads, spec.head_dim, page_size, dtype, spec.parts))
        return cls(groups, tuple(layouts), tuple(states))

    @property
    def page_size(self) -> int:
        return self.layouts[0].page_size

    @property
    def page_bytes(self) -> int:
        return self.layouts[0].page_bytes

    @property
    def dtype(self) -> torch.dtype:
        return self.layouts[0].dtype

    @property
    def num_kv_heads(self) -> int:
        """In all groups, where several ranks share them: see `with_heads`."""
        return self.layouts[0].num_kv_heads

    @property
    def bytes_per_token(self) -> int:
        """In all groups but those of states."""
        return len(self.layouts) * self.page_bytes // self.page_size

    def pages(self, rows: int) -> int:
        """Size of a pool that is to hold so many page indexes of sequences. In groups of states few of these
        have a page."""
        return rows * len(self.layouts) + min(rows, max(ROWS_WITH_STATES, rows // 8)) * len(self.states)

    def with_heads(self, heads: int) -> PoolLayout:
        """The part of each page that has so many of the heads, and as large a share of the states."""
        states = tuple(each.divided(self.num_kv_heads // heads) for each in self.states)
        layouts = tuple(replace(each, num_kv_heads=heads) for each in self.layouts)
        return replace(self, layouts=layouts, states=states)


ROWS_WITH_STATES = 12
"""Enough for two long sequences: see State.peak."""


class StatePool:
    """The view of a group of states of a pool's pages."""

    def __init__(self, layout: StateLayout, raw: torch.Tensor) -> None:
        """`raw`: uint8 [pages, page_bytes]."""
        layer_numbers = sum(map(math.prod, layout.shapes))
        numbers = raw.view(torch.float32)
        self.layers: list[list[torch.Tensor]] = []
        """Tensors of each layer, float32 [pages, *shape]."""
        for layer in range(layout.num_layers):
            sizes = [math.prod(shape) for shape in layout.shapes]
            parts = torch.split(numbers[:, layer * layer_numbers : (layer + 1) * layer_numbers], sizes, 1)
            shaped = zip(parts, layout.shapes, strict=True)
            self.layers.append([part.view(-1, *shape) for part, shape in shaped])


class KvPool:
    """A group's view of a pool of `num_pages` pages: [page, kv head, layer, part, token, dim].

    Several ranks of a worker may share a pool, each with a KvPool over the same storage for its own `heads`.

    On a CPU the pool can lie in `storage`, a writable buffer of at least num_pages * page_bytes bytes (a
    shared mapping, say), which must outlive it. `spare` more pages follow the last one: no sequence owns
    them, and rows that pad a batch are written there. Contents are undefined until written, on
    a GPU they are zeros. Raises ValueError for a buffer that is too small, and for one on a device other than
    the CPU.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_pages: int,
        device: torch.device | str = "cpu",
        storage: memoryview | torch.Tensor | None = None,
        spare: int = 0,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """`storage`: a tensor: `raw` of another group's view. `heads`: first and number of the KV heads that
        are read and written here; None: all."""
        self.layout = layout
        self.heads = heads or (0, layout.num_kv_heads)
        self.num_pages = num_pages
        self.device = torch.device(device)
        total = num_pages + spare
        size = total * layout.page_bytes
        if storage is None:
            # Kernels on a GPU multiply entries behind a sequence's end by 0, and 0 times NaN is NaN.
            make = torch.empty if self.device.type == "cpu" else torch.zeros
            raw = make(size, dtype=torch.uint8, device=self.device)
        elif isinstance(storage, torch.Tensor):
            raw = storage.view(-1)
        else:
            if self.device.type != "cpu":
                raise ValueError(f"a pool on {self.device} cannot lie in a buffer of the host")
            if storage.nbytes < size:
                raise ValueError(f"the buffer has {storage.nbytes} bytes, {num_pages} pages need {size}")
            raw = torch.frombuffer(storage, dtype=torch.uint8, count=size)
        self.raw = raw.view(total, layout.page_bytes)
        """uint8 [num_pages + spare, page_bytes]."""
        self.pages = raw.view(layout.dtype).view(
            total, layout.num_kv_heads, layout.num_layers, layout.parts, layout.page_size, layout.head_dim
        )
        first, count = self.heads
        self._shard_pages = self.pages[:, first : first + count]
        self.vectors = self.pages.view(-1, layout.head_dim)
        """[num_pages * num_kv_heads * num_layers * 2 * page_size, head_dim], of two parts. The key of `page`,
        `head`, `layer`, `offset` is entry (((page * num_kv_heads + head) * num_layers + layer) * 2) *
        page_size + offset; its value follows page_size entries later."""
        self.halves = self.pages.view(-1, layout.page_size * layout.head_dim)
        """[num_pages * num_kv_heads * num_layers * 2, page_size * head_dim]: a page's keys of a head in a
        layer are entry ((page * num_kv_heads + head) * num_layers + layer) * 2, its values the next."""

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer: strided views [num_pages, page_size, heads, head_dim]. Of latents both
        are the same."""
        view = self._shard_pages[:, :, index].transpose(1, 3)
        return view[:, :, 0], view[:, :, -1]

    def page_bytes(self, page: int) -> memoryview:
        """The bytes of a page, writable (CPU only)."""
        return self.raw[page].numpy().data

    def copy_page(self, source: int, destination: int) -> None:
        """The own heads."""
        self._shard_pages[destination].copy_(self._shard_pages[source])


class PagePool:
    """The pages of all groups: one allocation, and a view of it for each group. See KvPool."""

    def __init__(
        self,
        layout: PoolLayout,
        num_pages: int,
        device: torch.device | str = "cpu",
        storage: memoryview | None = None,
        spare: int = 0,
        heads: tuple[int, int] | None = None,
    ) -> None:
        self.layout = layout
        first = KvPool(layout.layouts[0], num_pages, device, storage, spare, heads)
        self.groups = [
            first if each == first.layout else KvPool(each, num_pages, device, first.raw, spare, heads)
            for each in layout.layouts
        ]
        """The view of each group but those of states."""
        self.states = [StatePool(each, first.raw) for each in layout.states]
        self.num_pages, self.device, self.heads, self.raw = num_pages, first.device, first.heads, first.raw

    def state(self, group: int, index: int) -> list[torch.Tensor]:
        """Tensors of the layer at `index` of a group of states, float32 [pages, *shape]."""
        return self.states[group - len(self.groups)].layers[index]

    def layer_pages(self, layer: int) -> torch.Tensor:
        """A layer's part of all pages: [page, kv head, part, token, dim]."""
        for group, view in zip(self.layout.groups, self.groups, strict=False):
            if layer in group.layers:
                return view.pages[:, :, group.layers.index(layer)]
        raise LookupError(f"layer {layer} keeps nothing")

    def copy_page(self, source: int, destination: int) -> None:
        """The own heads."""
        self.groups[0].copy_page(source, destination)
