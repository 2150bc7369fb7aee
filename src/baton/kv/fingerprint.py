"""Everything that decides what is in a KV block, compared before two instances exchange any."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from baton.errors import FingerprintMismatchError
from baton.hashing import HASH_SCHEME
from baton.kv.layout import LAYOUT_NAME, KVLayout, LayerShape


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of an instance's KV. ``model`` is a label; every other field must be equal between peers."""

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
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    hash_scheme: str = HASH_SCHEME

    @classmethod
    def of(cls, *, model: str, model_digest: str, rope: str, layout: KVLayout) -> Fingerprint:
        """Build the fingerprint of a single-rank instance."""
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

        Rank and layer range are left out: a block hash names the tokens' KV, a shard of it is named by hash and rank.
        """
        names = ("model_digest", "adapter", "kv_dtype", "kv_scales", "rope", "block_size", "hash_scheme")
        text = json.dumps({name: getattr(self, name) for name in names}, sort_keys=True)
        return hashlib.sha256(text.encode()).digest()

    def digest(self) -> bytes:
        """Digest (32 bytes) of every field but the label: equal digests mean that blocks can be copied as they are."""
        values = dataclasses.asdict(self)
        del values["model"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()

    def require_equal(self, other: Fingerprint, *, who: str = "peer") -> None:
        """Refuse a peer whose blocks are not the same thing.

        Raises:
            FingerprintMismatchError: Names the first field that differs.
        """
        for item in dataclasses.fields(self):
            if item.name == "model":
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
