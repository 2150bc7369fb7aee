"""Two instances of any shape and dtype, a source that holds a model's KV and a target that fetches it."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from tests.support.transport.fake_device import FakeDeviceArena, StandInArena
from tests.support.transport.kv_shapes import pool_of
from tests.support.transport.transport_rig import in_thread, soon, tls_of

from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape, layer_types
from baton.kv_cache.shards import KVGeometry, KVShards, shard_layout, shard_specs
from baton.kv_transfer.blocks import (
    BlockFetcher,
    BlockServer,
    FetchResult,
    LinkOptions,
    MemoryNetwork,
    SequenceBlocks,
    ServerOptions,
    TcpOptions,
)
from baton.types import InstanceId
from baton_kernels.paged_attention.quantized import quantize_rows

LAYERS = (LayerShape(4, 6, 4), LayerShape(2, 8, 8), LayerShape(4, 6, 4))
DTYPES = ("float32", "bfloat16", "float16")
KV_TYPES = (*DTYPES, "int8")
TOKENS = 192
Shape = tuple[int, int, int]
"""TP, PP, block size."""
RESHARDED: tuple[Shape, Shape] = ((2, 1, 16), (1, 2, 32))


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The numbers as unsigned integers, which numpy has for all dtypes."""
    if tensor.dtype is torch.float32:
        return tensor.view(torch.int32).numpy().view(np.uint32)
    if tensor.dtype is torch.int8:
        return tensor.numpy().view(np.uint8)
    return tensor.view(torch.int16).numpy().view(np.uint16)


def kept_as(kv: list[tuple[torch.Tensor, ...]], types: tuple[str, ...]) -> list[tuple[np.ndarray, ...]]:
    """What blocks hold of K and V per layer: their numbers as bits, and with int8 the scales of both."""
    held = []
    for pair, kind in zip(kv, types, strict=True):
        if kind == "int8":
            (k, k_scales), (v, v_scales) = map(quantize_rows, pair)
            held.append((bits_of(k), bits_of(v), bits_of(k_scales), bits_of(v_scales)))
        else:
            held.append(tuple(bits_of(x.to(getattr(torch, kind))) for x in pair))
    return held


def read_as(kv: list[tuple[torch.Tensor, ...]], types: tuple[str, ...]) -> list[tuple[torch.Tensor, ...]]:
    """K and V per layer as their blocks' reader has them."""

    def one(x: torch.Tensor, kind: str) -> torch.Tensor:
        if kind != "int8":
            return x.to(getattr(torch, kind))
        q, scales = quantize_rows(x)
        return q.float() * scales.float()[..., None]

    return [tuple(one(x, kind) for x in pair) for pair, kind in zip(kv, types, strict=True)]


def whole_kv(layers: tuple[LayerShape, ...]) -> list[tuple[torch.Tensor, ...]]:
    """Per layer K and V float32 [heads, tokens, dim], within every dtype's range."""
    torch.manual_seed(len(layers))
    return [(torch.randn(x.kv_heads, TOKENS, x.k_dim), torch.randn(x.kv_heads, TOKENS, x.v_dim) * 100) for x in layers]


class Side:
    """An instance's arenas, and what they hold once everything is there."""

    def __init__(
        self,
        shape: Shape,
        dtype: str,
        kv: list[tuple[torch.Tensor, ...]],
        layers: tuple[LayerShape, ...],
        *,
        on_device: bool = False,
        shared: bool = False,
    ) -> None:
        tp, pp, self.size = shape
        whole = KVLayout(layers, self.size, dtype)
        base = Fingerprint.of(model="m", model_digest="d", rope="r", layout=whole)
        self.print = dataclasses.replace(base, tp_size=tp, pp_size=pp)
        geometry, specs = KVGeometry(layers, dtype), shard_specs(tp, pp)
        self.blocks = TOKENS // self.size
        arena = (StandInArena if shared else FakeDeviceArena) if on_device else HostArena
        sizes = [shard_layout(geometry, spec, self.size).block_bytes for spec in specs]
        self.shards = KVShards([arena(self.blocks, size) for size in sizes])
        arrays = kept_as(kv, layer_types(dtype, len(layers)))
        self.pools = [pool_of(geometry, spec, self.size, arrays) for spec in specs]

    def fill(self) -> None:
        for memory, pool in zip(self.memories(), self.pools, strict=True):
            memory[:] = pool
        self.shards.primary.generations[:] = np.arange(self.blocks) + 5

    def memories(self) -> list[np.ndarray]:
        """The blocks of all ranks, wherever they lie, uint8 [blocks, block_bytes] each."""
        arenas = self.shards.arenas
        devices = (FakeDeviceArena, StandInArena)
        return [arena.device_memory if isinstance(arena, devices) else arena.blocks for arena in arenas]


class Pair:
    """A source with its blocks, and a target that takes them."""

    def __init__(
        self,
        kind: str,
        streams: int = 1,
        shapes: tuple[Shape, Shape] = RESHARDED,
        dtypes: tuple[str, str] = ("float32", "bfloat16"),
        layers: tuple[LayerShape, ...] = LAYERS,
        on_device: tuple[bool, bool] = (False, False),
    ) -> None:
        kv = whole_kv(layers)
        self.layers = layers
        shared = kind in ("cuda_ipc", "nixl")
        on_device = (True, True) if kind == "cuda_ipc" else on_device
        self.source = Side(shapes[0], dtypes[0], kv, layers, on_device=on_device[0], shared=shared)
        if dtypes[0] != dtypes[1]:
            kv = read_as(kv, layer_types(dtypes[0], len(layers)))
        self.target = Side(shapes[1], dtypes[1], kv, layers, on_device=on_device[1], shared=shared)
        self.source.fill()
        network = MemoryNetwork()
        options = ServerOptions(memory=network, tls=tls_of(kind))
        self.server = BlockServer(
            self.source.shards, self.source.print, InstanceId("p"), kinds=(kind,), options=options
        )
        self._links = LinkOptions(tcp=TcpOptions(streams, share_bytes=1), memory=network, tls=tls_of(kind))
        self.fetcher = self.open_fetcher(kind, kv_cast=True)

    def open_fetcher(self, kind: str, *, kv_cast: bool) -> BlockFetcher:
        mine = dataclasses.replace(self.target.print, kv_cast=kv_cast)
        return BlockFetcher(self.target.shards, mine, kinds=(kind,), links=self._links)

    def blocks(self, *, held: int = 0, ready: int | None = None) -> SequenceBlocks:
        ids = np.arange(self.source.blocks)
        writable = np.arange(self.target.blocks) >= held
        offered = (ids, self.source.shards.primary.generations[ids], ids)
        return SequenceBlocks.of(offered, np.arange(self.target.blocks), writable, ready)

    def fetch(self, *, held: int = 0, ready: int | None = None) -> FetchResult:
        blocks = self.blocks(held=held, ready=ready)
        return self.fetcher.fetch_sequence(self.server.source, blocks, deadline=soon())

    def fetch_as_computed(self) -> FetchResult:
        """Fetch while the source computes layer by layer; it cannot end before the last of them."""
        call = in_thread(lambda: self.fetch(ready=0))
        progress = self.source.shards.primary.progress
        for layer in range(1, len(self.layers) + 1):
            assert not call.done()
            progress.advance(layer)
        result: FetchResult = call.result(240)
        return result

    def fetch_recycled(self, block: int) -> FetchResult:
        """Fetch all blocks, of which the source has given one to others by now."""
        blocks = self.blocks()
        self.source.shards.primary.generations[block] += 1
        return self.fetcher.fetch_sequence(self.server.source, blocks, deadline=soon())

    def right(self, first: int = 0, end: int | None = None) -> bool:
        return all(
            np.array_equal(memory[first:end], pool[first:end])
            for memory, pool in zip(self.target.memories(), self.target.pools, strict=True)
        )

    def close(self) -> None:
        self.fetcher.close()
        self.server.close()
        self.source.shards.close()
        self.target.shards.close()
