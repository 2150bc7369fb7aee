"""What comes with every call of a client and is the same each time: read once."""

from __future__ import annotations

import functools
from weakref import WeakKeyDictionary

from baton.api.v1 import common_pb2
from baton.errors import InvalidRequestError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.protocol.source_pb import source_to_pb
from baton.rpc.convert import fingerprint_from_pb
from baton_kvstore.memory.pool import Pool
from baton_kvstore.transfer import PoolIO

_MAX_KEPT_BYTES = 65536
"""Of a fingerprint that is worth keeping; that of a model with a thousand layers has less."""


def read_fingerprint(message: common_pb2.Fingerprint) -> Fingerprint:
    """Read what blocks are; however their owners divide them, they are kept whole.

    Raises:
        InvalidRequestError: It is missing, or the layer shapes are no triples.
    """
    if not message.block_bytes:
        raise InvalidRequestError("a fingerprint is needed, with block_bytes", field="fingerprint")
    data = message.SerializeToString()
    return _read(data) if len(data) <= _MAX_KEPT_BYTES else fingerprint_from_pb(message).undivided()


class Sources:
    """Where pools can be read, as messages."""

    def __init__(self, lanes: PoolIO) -> None:
        self._lanes = lanes
        self._messages: WeakKeyDictionary[Pool, common_pb2.KvSource] = WeakKeyDictionary()

    def of(self, pool: Pool) -> common_pb2.KvSource:
        """Return a pool's.

        Raises:
            ConfigError: Its pipes cannot listen.
        """
        message = self._messages.get(pool)
        if message is None:
            message = self._messages[pool] = source_to_pb(self._lanes.source(pool))
        return message


@functools.lru_cache(maxsize=64)
def _read(data: bytes) -> Fingerprint:
    return fingerprint_from_pb(common_pb2.Fingerprint.FromString(data)).undivided()
