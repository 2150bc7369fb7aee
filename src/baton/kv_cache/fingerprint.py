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
"""What may differ between instances that exchange blocks: how the same KV is cut up."""
DTYPE_FIELDS = frozenset({"kv_dtype", "kv_cast", "layout"})
"""What may differ too where the reader converts."""
_TIER = "kv_tier_dtype"
_HOW_TO_CAST = "; an instance with --kv-cast takes KV of another dtype, and converts it"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of an instance's KV, all ranks together. ``model`` is a label.

    Attributes:
        layer_shapes: Of the whole model, undivided; so are ``block_bytes``.
        kv_dtype: KV type of all layers, see :mod:`baton.kv_cache.layout`.
        kv_scales: Digest of the checkpoint's scales, where the KV type has such.
        unsplit_layers: Layers whose heads every rank holds, in rising order.
        layer_groups: Per layer the number of the group whose blocks it lies in; empty: a block holds all layers.
        kv_cast: Whether the instance takes KV of other dtypes and converts it. What it holds may then have been
            computed in another dtype, so it is not the KV of instances that hold their own alone.
        draft: Whose KV the last ``draft_layers`` layers are, a drafter's name and digest; empty: they are all the
            model's. Blocks have the same names with it and without, and instances exchange what they have in common.
        draft_layers: How many these are.
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
            layout=layout_name(layout.dtype),
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
            draft: See the attributes.
            shapes: Of its layers.
            dtype: Of all of them.
        """
        every, count = (*self.layer_shapes, *shapes), len(self.layer_shapes)
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
        """Return the fingerprint of this KV, undivided, as stores and files keep it in a type of their own.

        It says ``kv_cast``: whoever loads such KV has it converted, and declares so.

        Args:
            kv_dtype: Their type; ``auto``: the instance's.

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
        whole = whole.without_draft()  # which nobody converts
        layout = KVLayout(whole.layer_shapes, self.block_size, kv_dtype)
        return dataclasses.replace(
            whole, kv_dtype=kv_dtype, layout=layout_name(kv_dtype), block_bytes=layout.block_bytes
        )

    @property
    def geometry(self) -> KVGeometry:
        """The whole model's KV."""
        return KVGeometry(self.layer_shapes, self.kv_dtype, frozenset(self.unsplit_layers))

    @property
    def grid(self) -> ShardGrid:
        """How it is cut up."""
        return ShardGrid(self.tp_size, self.pp_size, self.block_size, self.layer_groups)

    def plan_from(self, source: Fingerprint, *, who: str = "source") -> ReshardPlan:
        """Map another instance's blocks to this one's; bytes are those of the source's dtype on both sides.

        Of layers of drafts those are mapped that are of the same drafter and dtype.

        Raises:
            FingerprintMismatchError: Its KV is not what this instance takes, or one of the shapes does not fit the
                model; names the field.
        """
        self.require_source(source, who=who)
        common = len(self.layer_shapes)
        if (self.draft, self.kv_dtype) != (source.draft, source.kv_dtype):
            common -= self.draft_layers
        return reshard(source.geometry, source.grid, self.grid, self.geometry, common)

    @property
    def kind(self) -> str:
        """What decides who takes whose KV among instances of one model: dtype, and whether others are taken."""
        dtype = self.without_draft().kv_dtype
        return f"{dtype}, cast" if self.kv_cast else dtype

    def takes(self, source: Fingerprint) -> bool:
        """Whether this instance takes KV of a source's dtype, all else being equal."""
        mine, theirs = _in_common(self, source)
        if mine.kv_dtype == theirs.kv_dtype:
            return self.kv_cast or not source.kv_cast
        return self.kv_cast and can_convert(theirs.kv_dtype, mine.kv_dtype)

    def require_source(self, source: Fingerprint, *, who: str = "source") -> None:
        """Refuse to read from a peer whose KV is not the same thing; it may be cut up otherwise.

        With ``kv_cast`` it may be of another dtype, or have been.

        Raises:
            FingerprintMismatchError: Names the first field that differs.
        """
        mine, theirs = _in_common(self, source)
        if self.kv_cast:
            _require_convertible(mine, theirs, who)
        mine._require(theirs, who, _free_for(self))
        if source.kv_cast and not self.kv_cast:
            raise _may_be_cast(f"of the {who}")

    def require_reader(self, reader: Fingerprint, *, who: str = "reader") -> None:
        """Refuse to be read by a peer that does not take this KV: :meth:`require_source` from the other side.

        Raises:
            FingerprintMismatchError: Names the first field that differs.
        """
        mine, theirs = _in_common(self, reader)
        if reader.kv_cast:
            _require_convertible(mine, theirs, who)
        mine._require(theirs, who, _free_for(reader))
        if self.kv_cast and not reader.kv_cast:
            raise _may_be_cast("here")

    def require_akin(self, other: Fingerprint, *, who: str = "peer") -> None:
        """Refuse a peer whose KV is of another model; it may be cut up otherwise, and of another dtype with scales.

        Raises:
            FingerprintMismatchError: Names the first field that differs.
        """
        mine, theirs = _in_common(self, other)
        scales = frozenset() if mine.kv_dtype == theirs.kv_dtype else {"kv_scales"}
        mine._require(theirs, who, SHAPE_FIELDS | DTYPE_FIELDS | scales)

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
                hint = _HOW_TO_CAST if free and item.name == "kv_dtype" else ""
                raise FingerprintMismatchError(
                    f"KV of the {who} differs in {item.name}: {_short(mine)} here, {_short(theirs)} there{hint}",
                    field=item.name,
                )


def _in_common(mine: Fingerprint, theirs: Fingerprint) -> tuple[Fingerprint, Fingerprint]:
    """Return two fingerprints as they are, or those of the models' layers if the drafters' differ."""
    if (mine.draft, mine.draft_layers) == (theirs.draft, theirs.draft_layers) and mine.kv_dtype == theirs.kv_dtype:
        return mine, theirs
    try:
        return mine.without_draft(), theirs.without_draft()
    except ConfigError as error:  # of what came over a network
        raise FingerprintMismatchError(error.message, field="kv_dtype") from error


def _free_for(reader: Fingerprint) -> frozenset[str]:
    """Which fields of a source a reader may differ in and still make its own KV of the source's."""
    return SHAPE_FIELDS | (DTYPE_FIELDS if reader.kv_cast else {"kv_cast"})


def _require_convertible(mine: Fingerprint, theirs: Fingerprint, who: str) -> None:
    """Refuse KV that no conversion makes what is here, or whose bytes lie in an order of their own."""
    if mine.kv_dtype == theirs.kv_dtype and mine.layout == theirs.layout:
        return
    if not can_convert(mine.kv_dtype, theirs.kv_dtype):
        raise FingerprintMismatchError(
            f"KV of the {who} differs in kv_dtype: {mine.kv_dtype} here, {theirs.kv_dtype:.80} there; fp8_e4m3 is not "
            "converted: its scales are the checkpoint's, not the blocks'",
            field="kv_dtype",
        )
    if theirs.layout != layout_name(theirs.kv_dtype):
        raise FingerprintMismatchError(
            f"KV of the {who} has a layout that is not known here: {_short(theirs.layout)}", field="layout"
        )


def _may_be_cast(whose: str) -> FingerprintMismatchError:
    return FingerprintMismatchError(
        f"KV {whose} may have been converted from another dtype (kv_cast): only an instance with --kv-cast takes it",
        field="kv_cast",
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@functools.lru_cache(maxsize=256)  # asked for with every call of a store, of a few fingerprints over and over
def _digest(fingerprint: Fingerprint) -> bytes:
    values = dataclasses.asdict(fingerprint)
    del values["model"]
    if not values["kv_cast"]:
        del values["kv_cast"]  # what was stored before there was such a thing keeps its name
    for name in ("layer_groups", "draft", "draft_layers"):
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
        values["unsplit_layers"] = fingerprint.unsplit_layers  # a latent is other KV than what it expands to
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()
