"""The instances that requests are placed on, side by side, and the part of them that one request may use.

A :class:`Candidates` is gathered when an instance comes or goes and serves every request until the next one does. A
request that may not use some of them (one is full, one failed it) takes a part: positions, no new gathering.
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
from baton_router.indexer.index_columns import IndexColumns
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.registry.instance import Instance
from baton_router.registry.load import RECENT_S, LoadColumns, LoadTracker
from baton_router.scheduler.kernels import free_rows, gather_side
from baton_router.scheduler.policy import FloatArray, Pairs, Ratings, Side, as_floats

KvCompat = npt.NDArray[np.bool_]
"""``compat[d, p]``: whether decode instance ``d`` takes the KV of prefill instance ``p``."""
_MAX_PARTS = 8
REFUSED = {"kv_dtype": -np.inf}
"""The term of a pair whose KV dtypes do not fit."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Instances of one format have the same block hashes: a prompt is hashed and looked up once for all of them.

    Attributes:
        content_key: Root of the hash chains, tenant salt aside.
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
        instances: The instances.
        ids: Their names.
        trackers: Their load.
        formats: Each one's position in ``Candidates.formats``.
        format_set: The different ones of these.
        block_sizes: Each one's tokens per block.
        at: Their positions among all of the role; ``None``: all of them.
        place: Where :attr:`at` is in memory; 0: all of them.
    """

    __slots__ = ("at", "block_sizes", "format_set", "formats", "ids", "instances", "place", "role", "trackers")

    def __init__(self, role: Role, instances: Sequence[Instance], formats: list[int]) -> None:
        self.role = role
        self.instances = instances
        self.formats = formats
        self.ids: list[InstanceId] = [x.instance_id for x in instances]
        self.trackers: list[LoadTracker] = [x.load for x in instances]
        self.format_set = set(formats)
        self.block_sizes = [x.info.fingerprint.block_size for x in instances if x.info is not None]
        self.at: npt.NDArray[np.int64] | None = None
        self.place = 0

    @property
    def positions(self) -> Sequence[int]:
        """Return :attr:`at` as numbers, also of all of them."""
        return range(len(self.ids)) if self.at is None else self.at.tolist()

    def take(self, at: npt.NDArray[np.int64]) -> Part:
        """Return the part with some of these, which are all of the role."""
        part = Part(self.role, (), [])
        part.at = at
        part.place = address_of(at)
        which = at.tolist()
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
        whole: All of them.
    """

    def __init__(self, role: Role, instances: Sequence[Instance], known: dict[BlockFormat, int]) -> None:
        formats = [known.setdefault(BlockFormat.of(x), len(known)) for x in instances]
        self.whole = Part(role, instances, formats)
        self._loads = LoadColumns(self.whole.trackers)
        self._parts: dict[bytes, Part] = {}

    def part(self, at: Sequence[int]) -> Part:
        """Return some of them; the latest parts are kept: while an instance is full most requests ask for the same."""
        return self._part(np.array(at, np.int64).tobytes())

    def free(self, sequences: int) -> Part:
        """Return those with room for so many sequences."""
        return self._part(free_rows(self._read().address, len(self.whole.ids), sequences))

    def _part(self, at: bytes) -> Part:
        if len(at) == 8 * len(self.whole.ids):
            return self.whole
        part = self._parts.get(at)
        if part is None:
            if len(self._parts) >= _MAX_PARTS:
                self._parts.clear()
            part = self._parts[at] = self.whole.take(np.frombuffer(at, np.int64))
        return part

    def side(self, part: Part, held: int, total: int, cost: float) -> Side:
        """Return a part as a policy sees it.

        Args:
            part: Of these.
            held: Where in memory the leading prompt tokens are that each of the role holds, float64.
            total: Prompt tokens.
            cost: Work that the request would be if nothing matched.
        """
        loads = self._read()
        size = len(part.ids)
        block = np.empty((6, size))
        place = 0
        if size:
            now = self.whole.trackers[0].now()
            place = address_of(block)
            gather_side(loads.address, held, part.place, size, float(max(1, total)), now, RECENT_S, place)
        return Side.of(part, block, cost, place)

    def _read(self) -> LoadColumns:
        if self._loads.over:
            self._loads = LoadColumns(self.whole.trackers)
        if self._loads.changed:
            self._loads.read()
        return self._loads


class Candidates:
    """The instances that a request can be placed on, gathered once for as long as they stay the same.

    Args:
        prefills: Ready prefill instances.
        decodes: Ready decode instances.

    Attributes:
        prefill: Prefill instances.
        decode: Decode instances.
        formats: Of all of them, prefill instances' first.
        compat: Which decode instance takes the KV of which prefill instance; ``None``: all of all.
        all_guided: Whether all of them take requests with a grammar.
    """

    __slots__ = ("_given", "_index", "all_guided", "compat", "decode", "formats", "prefill")

    def __init__(self, prefills: Sequence[Instance], decodes: Sequence[Instance]) -> None:
        self._given = prefills, decodes
        self.compat: KvCompat | None = kv_compat(prefills, decodes)
        known: dict[BlockFormat, int] = {}
        self.prefill = RoleCandidates(Role.PREFILL, prefills, known)
        self.decode = RoleCandidates(Role.DECODE, decodes, known)
        self.formats = list(known)
        self.all_guided = all(knows_grammars(x) for x in (*prefills, *decodes))
        self._index = self._watch()

    def is_of(self, prefills: Sequence[Instance], decodes: Sequence[Instance]) -> bool:
        """Whether it was made from these very list objects."""
        return self._given[1] is decodes and self._given[0] is prefills

    def _watch(self) -> IndexColumns:
        parts = self.prefill.whole, self.decode.whole
        appliers = [x.events for part in parts for x in part.instances]
        sizes = [x.block_size for x in self.formats]
        return IndexColumns(appliers, [at for part in parts for at in part.formats], sizes)

    def held(self, index: PrefixIndex, chains: Mapping[int, HashChain]) -> FloatArray:
        """Return how many leading prompt tokens every instance holds, prefill instances first.

        Args:
            index: The index.
            chains: The prompt by format; instances of other formats hold nothing.
        """
        if self._index.over:
            self._index = self._watch()
        return self._index.held(index, chains)

    @property
    def tiered(self) -> bool:
        """Whether an instance has told of slower tiers, as of the last :meth:`held`."""
        return bool(self._index.lower)

    def compat_of(self, prefill: Part, decode: Part) -> KvCompat | None:
        """Return :attr:`compat` of two parts; ``None``: all of all."""
        compat = self.compat
        if compat is None or not prefill.instances:
            return None
        if decode.at is not None:
            compat = compat[decode.at]
        return compat if prefill.at is None else compat[:, prefill.at]

    def kv_bytes_per_token(self, prefill: Part, decode: Part) -> float:
        """Return it of what travels, which is the source's KV."""
        source = self.formats[(prefill.formats or decode.formats)[0]]
        return source.block_bytes / source.block_size


def knows_grammars(instance: Instance) -> bool:
    """Whether an instance takes requests with a grammar."""
    return instance.info is not None and instance.info.grammars


def kv_compat(prefills: Sequence[Instance], decodes: Sequence[Instance]) -> KvCompat | None:
    """Return which decode instance takes KV of which prefill instance; ``None``: all of all. All must be ready."""
    if len({info.kind for x in (*prefills, *decodes) if (info := x.info) is not None}) == 1:
        return None
    rows: dict[str, list[bool]] = {}
    compat = []
    for decode in decodes:
        assert decode.info is not None  # it is ready
        row = rows.get(decode.info.kind)
        if row is None:
            mine = decode.info.fingerprint
            row = rows[decode.info.kind] = [x.info is not None and mine.takes(x.info.fingerprint) for x in prefills]
        compat.append(row)
    return np.array(compat, bool).reshape(len(decodes), len(prefills))


class _Refusing:
    """Rows of pairs of which some are refused."""

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

    refusing = Pairs(_Refusing(pairs, compat), explain, None if pairs is None else pairs.most)
    return msgspec.structs.replace(ratings, pairs=refusing)
