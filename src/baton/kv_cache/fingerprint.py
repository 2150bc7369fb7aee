"""Everything that decides what is in a KV block, compared before two instances exchange any."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass

from baton.errors import ConfigError, FingerprintMismatchError
from baton.hashing import HASH_SCHEME
from baton.kv_cache.layout import LAYOUT_NAME, KVLayout, LayerShape, can_convert, layer_types, layout_name, type_name
from baton.kv_cache.reshard import ReshardPlan, ShardGrid, reshard
from baton.kv_cache.shards import KVGeometry

SHAPE_FIELDS = frozenset({"tp_size", "pp_size", "block_size", "block_bytes", "layer_groups"})
"""Fields that may differ between instances that exchange blocks: how the same KV is divided."""
DTYPE_FIELDS = frozenset({"kv_dtype", "kv_cast", "layout"})
"""Fields that may also differ if the reader converts."""
_TIER = "kv_tier_dtype"
_HOW_TO_CAST = "; an instance with --kv-cast takes KV of another dtype, and converts it"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of an instance's KV, all ranks together. ``model`` is a label.

    Attributes:
        layer_shapes: Shape of each layer of the whole model, undivided.
        block_bytes: Size of an undivided block.
        kv_dtype: KV type of all layers, see :func:`baton.kv_cache.layout.type_name`.
        kv_scales: Digest of the checkpoint's scales, if the KV type has some.
        unsplit_layers: Layers whose heads every rank holds, in rising order.
        layer_groups: Group number of each layer; empty: a block holds all layers.
        kv_cast: Whether the instance accepts KV of other dtypes and converts it. Its blocks may then have been
            computed in another dtype, so instances without ``kv_cast`` do not accept them.
        draft: Name and digest of the drafter that the last ``draft_layers`` layers belong to; empty: all layers are the
            model's. Block hashes do not depend on it, and instances exchange the layers that they have in common.
        draft_layers: Number of the drafter's layers.
        states: Kinds, sizes and types of the recurrent states that go with the KV, and the size of the blocks that they
            are put into; empty: the model has none.
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
    kv_cast: bool = False
    layer_groups: tuple[int, ...] = ()
    draft: str = ""
    draft_layers: int = 0
    states: str = ""

    def __hash__(self) -> int:
        # Hashed with every call of a store: the layers, which are most of it, are left to the comparison.
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
            layout=layout_name(layout.dtype),
        )

    def content_key(self) -> bytes:
        """Return a digest (32 bytes) of all that decides the numbers in a block: the root of its hash chain.

        The parallel shape is left out: a block hash identifies the tokens' KV, however it is divided.
        """
        return _content_key(self)

    def digest(self) -> bytes:
        """Return a digest (32 bytes) of every field but the label: equal digests mean equally divided blocks."""
        return _digest(self)

    def undivided(self) -> Fingerprint:
        """Return the fingerprint of the same KV on a single rank."""
        return dataclasses.replace(self, tp_size=1, pp_size=1, layer_groups=())

    def without_draft(self) -> Fingerprint:
        """Return the fingerprint of the model's own layers alone."""
        if not self.draft_layers:
            return self
        count = max(1, len(self.layer_shapes) - self.draft_layers)
        shapes = self.layer_shapes[:count]
        dtype = type_name(layer_types(self.kv_dtype, len(self.layer_shapes))[:count])
        return dataclasses.replace(
            self,
            kv_dtype=dtype,
            layout=layout_name(dtype),
            layer_shapes=shapes,
            block_bytes=KVLayout(shapes, self.block_size, dtype).block_bytes,
            unsplit_layers=tuple(layer for layer in self.unsplit_layers if layer < count),
            draft="",
            draft_layers=0,
        )

    def with_draft(self, draft: str, shapes: tuple[LayerShape, ...], dtype: str) -> Fingerprint:
        """Return the fingerprint with a drafter's layers behind the model's, each whole on every rank.

        Args:
            draft: Name and digest of the drafter.
            shapes: Shape of each of the drafter's layers.
            dtype: Dtype of all of the drafter's layers.
        """
        every = (*self.layer_shapes, *shapes)
        count = len(self.layer_shapes)
        kinds = type_name((*layer_types(self.kv_dtype, count), *(dtype for _ in shapes)))
        return dataclasses.replace(
            self,
            kv_dtype=kinds,
            layout=layout_name(kinds),
            layer_shapes=every,
            block_bytes=KVLayout(every, self.block_size, kinds).block_bytes,
            unsplit_layers=(*self.unsplit_layers, *range(count, len(every))),
            draft=draft,
            draft_layers=len(shapes),
        )

    def kept_as(self, kv_dtype: str) -> Fingerprint:
        """Return the fingerprint of this KV as stores and files hold it: undivided, and of another KV type if wanted.

        It has ``kv_cast`` set if the type differs: an instance that loads such KV converts it.

        Args:
            kv_dtype: KV type of the stored blocks; ``auto``: the instance's.

        Raises:
            ConfigError: This instance does not convert, or not to that type; names ``kv_tier_dtype``.
        """
        whole = self.undivided()
        if kv_dtype in ("auto", self.kv_dtype):
            return whole
        if not self.kv_cast:
            raise ConfigError(f"kv_tier_dtype {kv_dtype} needs --kv-cast: what is loaded was converted", field=_TIER)
        if not can_convert(self.kv_dtype, kv_dtype):
            raise ConfigError(
                f"KV of {self.kv_dtype} is not kept as {kv_dtype}: fp8_e4m3 is not converted", field=_TIER
            )
        whole = whole.without_draft()  # its KV is never converted
        layout = KVLayout(whole.layer_shapes, self.block_size, kv_dtype)
        return dataclasses.replace(
            whole, kv_dtype=kv_dtype, layout=layout_name(kv_dtype), block_bytes=layout.block_bytes
        )

    @property
    def geometry(self) -> KVGeometry:
        """Geometry of the whole model's KV."""
        return KVGeometry(self.layer_shapes, self.kv_dtype, frozenset(self.unsplit_layers))

    @property
    def grid(self) -> ShardGrid:
        """Parallel shape and block size of the instance."""
        return ShardGrid(self.tp_size, self.pp_size, self.block_size, self.layer_groups)

    def plan_from(self, source: Fingerprint, *, who: str = "source") -> ReshardPlan:
        """Map another instance's blocks to this one's; bytes are those of the source's dtype on both sides.

        A drafter's layers are mapped if both sides have the same drafter and dtype.

        Raises:
            FingerprintMismatchError: This instance does not accept the source's KV, or one of the shapes does not fit
                the model; names the field.
        """
        self.require_source(source, who=who)
        common = len(self.layer_shapes)
        if (self.draft, self.kv_dtype) != (source.draft, source.kv_dtype):
            common -= self.draft_layers
        return reshard(source.geometry, source.grid, self.grid, self.geometry, common)

    @property
    def kind(self) -> str:
        """What decides which instances of one model accept each other's KV: dtype, and whether others are accepted."""
        dtype = self.without_draft().kv_dtype
        return f"{dtype}, cast" if self.kv_cast else dtype

    def takes(self, source: Fingerprint) -> bool:
        """Return whether this instance accepts KV of a source's dtype, all else being equal."""
        own, other = _in_common(self, source)
        if own.kv_dtype == other.kv_dtype:
            return self.kv_cast or not source.kv_cast
        return self.kv_cast and can_convert(other.kv_dtype, own.kv_dtype)

    def require_source(self, source: Fingerprint, *, who: str = "source") -> None:
        """Check that this instance can read a source's KV: the same KV, possibly divided in another way.

        With ``kv_cast`` it may be, or may have been, of another dtype.

        Raises:
            FingerprintMismatchError: Names the first field that differs.
        """
        own, other = _in_common(self, source)
        if self.kv_cast:
            _require_convertible(own, other, who)
        own._require(other, who, _free_for(self))
        if source.kv_cast and not self.kv_cast:
            raise _may_be_cast(f"of the {who}")

    def require_reader(self, reader: Fingerprint, *, who: str = "reader") -> None:
        """Check that a reader accepts this KV: :meth:`require_source` from the other side.

        Raises:
            FingerprintMismatchError: Names the first field that differs.
        """
        own, other = _in_common(self, reader)
        if reader.kv_cast:
            _require_convertible(own, other, who)
        own._require(other, who, _free_for(reader))
        if self.kv_cast and not reader.kv_cast:
            raise _may_be_cast("here")

    def require_akin(self, other: Fingerprint, *, who: str = "peer") -> None:
        """Check that a peer's KV is of the same model; it may be divided in another way, and of another dtype.

        Raises:
            FingerprintMismatchError: Names the first field that differs.
        """
        own, peer = _in_common(self, other)
        scales = frozenset() if own.kv_dtype == peer.kv_dtype else {"kv_scales"}
        own._require(peer, who, SHAPE_FIELDS | DTYPE_FIELDS | scales)

    def require_equal(self, other: Fingerprint, *, who: str = "peer") -> None:
        """Check that a peer's blocks are the same, divided in the same way.

        Raises:
            FingerprintMismatchError: Names the first field that differs.
        """
        self._require(other, who, frozenset())

    def _require(self, other: Fingerprint, who: str, free: frozenset[str]) -> None:
        for item in dataclasses.fields(self):
            if item.name == "model" or item.name in free:
                continue
            own_value = getattr(self, item.name)
            other_value = getattr(other, item.name)
            if own_value != other_value:
                hint = _HOW_TO_CAST if free and item.name == "kv_dtype" else ""
                raise FingerprintMismatchError(
                    f"KV of the {who} differs in {item.name}: {_short(own_value)} here, "
                    f"{_short(other_value)} there{hint}",
                    field=item.name,
                )


def _in_common(own: Fingerprint, other: Fingerprint) -> tuple[Fingerprint, Fingerprint]:
    """Return two fingerprints as they are, or those of the models' layers alone if the drafters differ."""
    if (own.draft, own.draft_layers) == (other.draft, other.draft_layers) and own.kv_dtype == other.kv_dtype:
        return own, other
    try:
        return own.without_draft(), other.without_draft()
    except ConfigError as error:  # a fingerprint that came over the network
        raise FingerprintMismatchError(error.message, field="kv_dtype") from error


def _free_for(reader: Fingerprint) -> frozenset[str]:
    """Return the fields in which a reader may differ from a source whose KV it can use."""
    return SHAPE_FIELDS | (DTYPE_FIELDS if reader.kv_cast else {"kv_cast"})


def _require_convertible(own: Fingerprint, other: Fingerprint, who: str) -> None:
    """Check that KV can be converted to this instance's type, and that its byte order is known."""
    if own.kv_dtype == other.kv_dtype and own.layout == other.layout:
        return
    if not can_convert(own.kv_dtype, other.kv_dtype):
        raise FingerprintMismatchError(
            f"KV of the {who} differs in kv_dtype: {own.kv_dtype} here, {other.kv_dtype:.80} there; fp8_e4m3 is not "
            "converted: its scales are the checkpoint's, not the blocks'",
            field="kv_dtype",
        )
    if other.layout != layout_name(other.kv_dtype):
        raise FingerprintMismatchError(
            f"KV of the {who} has a layout that is not known here: {_short(other.layout)}", field="layout"
        )


def _may_be_cast(whose: str) -> FingerprintMismatchError:
    return FingerprintMismatchError(
        f"KV {whose} may have been converted from another dtype (kv_cast): only an instance with --kv-cast takes it",
        field="kv_cast",
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@functools.lru_cache(maxsize=256)  # called for every call of a store, with few different fingerprints
def _digest(fingerprint: Fingerprint) -> bytes:
    values = dataclasses.asdict(fingerprint)
    del values["model"]
    if not values["kv_cast"]:
        del values["kv_cast"]  # blocks that were stored before this field existed keep their digest
    for name in ("layer_groups", "draft", "draft_layers", "states"):
        if not values[name]:
            del values[name]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


@functools.lru_cache(maxsize=256)
def _content_key(fingerprint: Fingerprint) -> bytes:
    fingerprint = fingerprint.without_draft()
    names = ("model_digest", "adapter", "kv_dtype", "kv_scales", "rope", "block_size", "hash_scheme")
    values = {name: getattr(fingerprint, name) for name in names}
    if fingerprint.kv_cast:
        values["kv_cast"] = True
    if fingerprint.unsplit_layers:
        values["unsplit_layers"] = fingerprint.unsplit_layers  # a latent is different KV from what it expands to
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()
