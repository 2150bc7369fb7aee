"""What placement needs of the ready instances and what stays the same for as long as they are.

It is gathered once instead of per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.types import InstanceId, Role
from baton_router.indexer.event_applier import EventApplier
from baton_router.registry.instance import Instance
from baton_router.registry.load import InstanceLoad
from baton_router.scheduler.kv_compat import Takes, who_takes


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Instances whose blocks have the same hashes: a prompt is hashed and looked up once for all of them.

    Attributes:
        content_key: What their blocks are of, tenant salt aside.
        block_size: Tokens per block.
        block_bytes: Bytes per block.
    """

    content_key: bytes
    block_size: int
    block_bytes: int


class RoleCandidates:
    """The instances of one role, as parallel lists.

    Attributes:
        role: Theirs.
        instances: Themselves.
        ids: Their names.
        books: Their load.
        kinds: Which of the roster's kinds each is of.
        places: The same beside its part of the index: both are gone through several times per request.
    """

    __slots__ = ("books", "ids", "instances", "kinds", "places", "role")

    def __init__(self, role: Role, instances: Sequence[Instance], known: dict[BlockFormat, int]) -> None:
        self.role = role
        self.instances = instances
        self.ids: list[InstanceId] = [x.instance_id for x in instances]
        self.books: list[InstanceLoad] = [x.load for x in instances]
        self.kinds = [known.setdefault(_kind(x), len(known)) for x in instances]
        self.places: list[tuple[EventApplier, int]] = [
            (x.events, at) for x, at in zip(instances, self.kinds, strict=True)
        ]


class Candidates:
    """The instances that a request can be placed on.

    Args:
        prefills: Ready prefill instances; those that no decode instance takes KV of are left out.
        decodes: Ready decode instances.

    Attributes:
        given: The arguments: a roster is good for as long as the lists are the same objects.
        prefill: Prefill instances.
        decode: Decode instances.
        kinds: Of all of them, prefill instances' first.
        takes: Which decode instance takes KV of which prefill instance; ``None``: all of all.
    """

    __slots__ = ("decode", "given", "kinds", "prefill", "takes")

    def __init__(self, prefills: Sequence[Instance], decodes: Sequence[Instance]) -> None:
        self.given = prefills, decodes
        self.takes: Takes | None = who_takes(prefills, decodes)
        if self.takes is not None and not any(map(any, self.takes)):
            prefills, self.takes = (), None
        known: dict[BlockFormat, int] = {}
        self.prefill = RoleCandidates(Role.PREFILL, prefills, known)
        self.decode = RoleCandidates(Role.DECODE, decodes, known)
        self.kinds = list(known)

    def is_of(self, prefills: Sequence[Instance], decodes: Sequence[Instance]) -> bool:
        """Whether it was made from these very lists."""
        return self.given[1] is decodes and self.given[0] is prefills


def _kind(instance: Instance) -> BlockFormat:
    info = instance.info
    assert info is not None  # a ready instance has said what it is
    return BlockFormat(info.content_key, info.fingerprint.block_size, info.fingerprint.block_bytes)
