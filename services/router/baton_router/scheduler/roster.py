"""The instances that requests are placed on, as columns, and the part of them that one request may use.

:class:`Candidates` are gathered when an instance is added or removed and serve every request until the next change. A
request that may not use some of them (one is full, one failed it) gets a part: positions, no new gathering.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from baton.hashing import HashChain
from baton.native import address_of
from baton.types import InstanceId, Role
from baton_router.indexer.events import IndexColumns
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.registry.instance import Instance
from baton_router.registry.load import RECENT_S, LoadColumns, LoadTracker
from baton_router.scheduler.kernels import SIDE_ROW, free_rows, gather_side
from baton_router.scheduler.policy import FloatArray, Pairs, Ratings, Side, as_floats

KvCompat = npt.NDArray[np.bool_]
"""``compat[d, p]``: whether decode instance ``d`` can use the KV of prefill instance ``p``."""
_MAX_PARTS = 8
REFUSED = {"kv_dtype": -np.inf}
"""The term of a pair that cannot exchange KV: dtypes do not fit, or nothing came over the pipes lately."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What block hashes depend on: a prompt is hashed and looked up once for all instances of one format.

    Attributes:
        content_key: Root of the hash chains, without the tenant's salt.
        block_size: Tokens per block.
        block_bytes: Bytes per block.
    """

    content_key: bytes
    block_size: int
    block_bytes: int

    @classmethod
    def of(cls, instance: Instance) -> BlockFormat:
        info = instance.info
        assert info is not None  # it is ready
        return cls(info.content_key, info.fingerprint.block_size, info.fingerprint.block_bytes)


class Part:
    """Instances of one role that a request may use, as parallel lists.

    Attributes:
        role: Role of the instances.
        instances: The instances.
        ids: Names of the instances.
        trackers: Loads of the instances.
        formats: Each instance's position in ``Candidates.formats``.
        format_set: The distinct values of ``formats``.
        block_sizes: Each instance's tokens per block.
        subset: Positions of the instances among all of the role; ``None``: it has all of them.
        address: Memory address of ``subset``; 0: it has all of them.
    """

    __slots__ = ("address", "block_sizes", "format_set", "formats", "ids", "instances", "role", "subset", "trackers")

    def __init__(self, role: Role, instances: Sequence[Instance], formats: list[int]) -> None:
        self.role = role
        self.instances = instances
        self.formats = formats
        self.ids: list[InstanceId] = [x.instance_id for x in instances]
        self.trackers: list[LoadTracker] = [x.load for x in instances]
        self.format_set = set(formats)
        self.block_sizes = [x.info.fingerprint.block_size for x in instances if x.info is not None]
        self.subset: npt.NDArray[np.int64] | None = None
        self.address = 0

    @property
    def positions(self) -> Sequence[int]:
        """Positions of the instances among all of the role."""
        return range(len(self.ids)) if self.subset is None else self.subset.tolist()

    def select(self, subset: npt.NDArray[np.int64]) -> Part:
        """Return the part with some instances of this one, which must have all of the role."""
        part = Part(self.role, (), [])
        part.subset = subset
        part.address = address_of(subset)
        which = subset.tolist()
        part.instances = [self.instances[i] for i in which]
        part.formats = [self.formats[i] for i in which]
        part.ids = [self.ids[i] for i in which]
        part.trackers = [self.trackers[i] for i in which]
        part.format_set = set(part.formats)
        part.block_sizes = [self.block_sizes[i] for i in which]
        return part


class RoleCandidates:
    """The instances of one role and their load.

    Attributes:
        whole: The part with all instances.
    """

    def __init__(self, role: Role, instances: Sequence[Instance], known: dict[BlockFormat, int]) -> None:
        formats = [known.setdefault(BlockFormat.of(x), len(known)) for x in instances]
        self.whole = Part(role, instances, formats)
        self._loads = LoadColumns(self.whole.trackers)
        self._parts: dict[bytes, Part] = {}

    def part(self, positions: Sequence[int]) -> Part:
        """Return some instances. The latest parts are cached: while an instance is full most requests use the same."""
        return self._part(np.array(positions, np.int64).tobytes())

    def with_room(self, sequences: int) -> Part:
        """Return the instances with room for so many sequences."""
        return self._part(free_rows(self._current_loads().address, len(self.whole.ids), sequences))

    def _part(self, positions: bytes) -> Part:
        if len(positions) == 8 * len(self.whole.ids):
            return self.whole
        part = self._parts.get(positions)
        if part is None:
            if len(self._parts) >= _MAX_PARTS:
                self._parts.clear()
            part = self._parts[positions] = self.whole.select(np.frombuffer(positions, np.int64))
        return part

    def side(self, part: Part, matched: int, total: int, cost: float) -> Side:
        """Return a part as a policy sees it.

        Args:
            part: A part of these instances.
            matched: Address of the leading prompt tokens that each instance of the role holds, float64.
            total: Number of prompt tokens.
            cost: Work that the request would add if nothing matched, in tokens.
        """
        loads = self._current_loads()
        size = len(part.ids)
        rows = np.empty(size, SIDE_ROW.dtype)
        if size:
            now = self.whole.trackers[0].now()
            tokens = float(max(1, total))
            gather_side(loads.address, matched, part.address, size, tokens, now, RECENT_S, address_of(rows))
        return Side.of_rows(part, rows, cost)

    def _current_loads(self) -> LoadColumns:
        if self._loads.over:
            self._loads = LoadColumns(self.whole.trackers)
        if self._loads.changed:
            self._loads.read()
        return self._loads


class Candidates:
    """The instances that a request can be placed on, gathered once until the set of instances changes.

    Args:
        prefills: Ready prefill instances.
        decodes: Ready decode instances.

    Attributes:
        prefill: Prefill instances.
        decode: Decode instances.
        formats: Formats of all instances, prefill instances' first.
        compat: Which decode instance can use the KV of which prefill instance; ``None``: each can use each.
        all_guided: Whether all instances accept requests with a grammar.
    """

    __slots__ = ("_index", "_lists", "all_guided", "compat", "decode", "formats", "prefill")

    def __init__(self, prefills: Sequence[Instance], decodes: Sequence[Instance]) -> None:
        self._lists = prefills, decodes
        self.compat: KvCompat | None = kv_compat(prefills, decodes)
        known: dict[BlockFormat, int] = {}
        self.prefill = RoleCandidates(Role.PREFILL, prefills, known)
        self.decode = RoleCandidates(Role.DECODE, decodes, known)
        self.formats = list(known)
        self.all_guided = all(knows_grammars(x) for x in (*prefills, *decodes))
        self._index = self._watch_index()

    def is_of(self, prefills: Sequence[Instance], decodes: Sequence[Instance]) -> bool:
        """Whether it was made from these list objects."""
        return self._lists[1] is decodes and self._lists[0] is prefills

    def _watch_index(self) -> IndexColumns:
        parts = self.prefill.whole, self.decode.whole
        appliers = [x.events for part in parts for x in part.instances]
        sizes = [x.block_size for x in self.formats]
        return IndexColumns(appliers, [at for part in parts for at in part.formats], sizes)

    def matched_tokens(self, index: PrefixIndex, chains: Mapping[int, HashChain]) -> FloatArray:
        """Return how many leading prompt tokens every instance holds, prefill instances first.

        Args:
            index: The index.
            chains: Hash chains of the prompt, by format; instances of other formats hold nothing.
        """
        if self._index.over:
            self._index = self._watch_index()
        return self._index.matched_tokens(index, chains)

    @property
    def tiered(self) -> bool:
        """Whether an instance has reported slower tiers, as of the last :meth:`matched_tokens`."""
        return bool(self._index.lower)

    def compat_of(self, prefill: Part, decode: Part) -> KvCompat | None:
        """Return :attr:`compat` of two parts; ``None``: each can use each."""
        compat = self.compat
        if compat is None or not prefill.instances:
            return None
        if decode.subset is not None:
            compat = compat[decode.subset]
        return compat if prefill.subset is None else compat[:, prefill.subset]

    def kv_bytes_per_token(self, prefill: Part, decode: Part) -> float:
        """Return the KV bytes per token on the wire (the source instance's format)."""
        source = self.formats[(prefill.formats or decode.formats)[0]]
        return source.block_bytes / source.block_size


def knows_grammars(instance: Instance) -> bool:
    """Whether an instance accepts requests with a grammar."""
    return instance.info is not None and instance.info.grammars


def kv_compat(prefills: Sequence[Instance], decodes: Sequence[Instance]) -> KvCompat | None:
    """Return which decode instance can use the KV of which prefill instance; ``None``: each can use each.

    It cannot where the formats do not fit, or where nothing came over the pipes between them lately. All instances must
    be ready.
    """
    if len({info.kind for x in (*prefills, *decodes) if (info := x.info) is not None}) == 1 and not any(
        x.load.unreadable for x in decodes
    ):
        return None
    rows: dict[str, list[bool]] = {}
    compat = []
    for decode in decodes:
        assert decode.info is not None  # it is ready
        row = rows.get(decode.info.kind)
        if row is None:
            own = decode.info.fingerprint
            row = rows[decode.info.kind] = [x.info is not None and own.takes(x.info.fingerprint) for x in prefills]
        unreadable = decode.load.unreadable
        if unreadable:
            row = [fits and x.address not in unreadable for fits, x in zip(row, prefills, strict=True)]
        compat.append(row)
    return np.array(compat, bool).reshape(len(decodes), len(prefills))


class _CompatibleRows:
    """Rows of pairs in which incompatible pairs score ``-inf``."""

    def __init__(self, pairs: Pairs | None, compat: KvCompat) -> None:
        self._pairs = pairs
        self._refused = np.where(compat, 0.0, -np.inf)

    def __getitem__(self, d: int, /) -> FloatArray:
        row: FloatArray = self._refused[d]
        return row if self._pairs is None else row + as_floats(self._pairs.rows[d])


def only_compatible(ratings: Ratings, compat: KvCompat) -> Ratings:
    """Return ratings in which pairs whose KV does not fit score ``-inf``."""
    pairs = ratings.pairs

    def explain(p: int, d: int) -> dict[str, float]:
        if not compat[d, p]:
            return REFUSED
        return {} if pairs is None else pairs.explain(p, d)

    rows = _CompatibleRows(pairs, compat)
    return msgspec.structs.replace(ratings, pairs=Pairs(rows, explain, None if pairs is None else pairs.most))
