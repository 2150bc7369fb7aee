"""Everything that decides what is in a KV block, compared before two instances exchange any."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass

from baton.errors import FingerprintMismatchError
from baton.hashing import HASH_SCHEME
from baton.kv.layout import LAYOUT_NAME, KVLayout, LayerShape
from baton.kv.reshard import ReshardPlan, ShardGrid, reshard
from baton.kv.shards import KVGeometry

SHAPE_FIELDS = frozenset({"tp_size", "pp_size", "block_size", "block_bytes"})
"""What may differ between instances that exchange blocks: how the same KV is cut up."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of an instance's KV, all ranks together. ``model`` is a label.

    Attributes:
        layer_shapes: Of the whole model, undivided; so are ``block_bytes``.
        unsplit_layers: Layers whose heads every rank holds, in rising order.
    """

    model: str
    model_digest: str
    kv_dtype: str
    block_size: int
    layer_shapes: tuple[LayerShape, ...]
    block_bytes: int
    rope: str = ""
    adapter: str = ""
    kv_scales: str = ""
    layout: str = LAYOUT_NAME
    tp_size: int = 1
    pp_size: int = 1
    hash_scheme: str = HASH_SCHEME
    unsplit_layers: tuple[int, ...] = ()

    def __hash__(self) -> int:
        # Looked up with every call of a store: the layers, which are most of it, are left to the comparison.
        return hash((self.model_digest, self.kv_dtype, self.block_size, self.block_bytes, self.adapter, self.tp_size))

    @classmethod
    def of(cls, *, model: str, model_digest: str, rope: str, layout: KVLayout) -> Fingerprint:
        """Build the fingerprint of an instance with one rank."""
        return cls(
            model=model,
            model_digest=model_digest,
            rope=rope,
            kv_dtype=layout.dtype,
            block_size=layout.block_size,
            layer_shapes=layout.layers,
            block_bytes=layout.block_bytes,
        )

    def content_key(self) -> bytes:
        """Digest (32 bytes) of what decides the numbers in a block: the root of its hash chain.

        The parallel shape is left out: a block hash names the tokens' KV, however it is divided.
        """
        return _content_key(self)

    def digest(self) -> bytes:
        """Digest (32 bytes) of every field but the label: equal digests mean that blocks are cut up alike."""
        return _digest(self)

    def undivided(self) -> Fingerprint:
        """Return the fingerprint of the same KV on a single rank."""
        return dataclasses.replace(self, tp_size=1, pp_size=1)

    @property
    def geometry(self) -> KVGeometry:
        """The whole model's KV."""
        return KVGeometry(self.layer_shapes, self.kv_dtype, frozenset(self.unsplit_layers))

    @property
    def grid(self) -> ShardGrid:
        """How it is cut up."""
        return ShardGrid(self.tp_size, self.pp_size, self.block_size)

    def plan_from(self, source: Fingerprint, *, who: str = "source") -> ReshardPlan:
        """Map another instance's blocks to this one's.

        Raises:
            FingerprintMismatchError: Its KV is not the same thing, or one of the shapes does not fit the model; names
                the field.
        """
        self.require_compatible(source, who=who)
        return reshard(self.geometry, source.grid, self.grid)

    def require_compatible(self, other: Fingerprint, *, who: str = "peer") -> None:
        """Refuse a peer whose KV is not the same thing; it may be cut up otherwise.

        Raises:
            FingerprintMismatchError: Names the first field that differs.
        """
        self._require(other, who, SHAPE_FIELDS)

    def require_equal(self, other: Fingerprint, *, who: str = "peer") -> None:
        """Refuse a peer whose blocks are not the same thing.

        Raises:
            FingerprintMismatchError: Names the first field that differs.
        """
        self._require(other, who, frozenset())

    def _require(self, other: Fingerprint, who: str, free: frozenset[str]) -> None:
        for item in dataclasses.fields(self):
            if item.name == "model" or item.name in free:
                continue
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if mine != theirs:
                raise FingerprintMismatchError(
                    f"KV of the {who} differs in {item.name}: {_short(mine)} here, {_short(theirs)} there",
                    field=item.name,
                )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@functools.lru_cache(maxsize=256)  # asked for with every call of a store, of a few fingerprints over and over
def _digest(fingerprint: Fingerprint) -> bytes:
    values = dataclasses.asdict(fingerprint)
    del values["model"]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


@functools.lru_cache(maxsize=256)
def _content_key(fingerprint: Fingerprint) -> bytes:
    names = ("model_digest", "adapter", "kv_dtype", "kv_scales", "rope", "block_size", "hash_scheme")
    text = json.dumps({name: getattr(fingerprint, name) for name in names}, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()
