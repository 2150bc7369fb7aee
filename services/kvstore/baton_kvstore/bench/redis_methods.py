"""Redis with the same blocks: through its usual Python client, and as lean as a socket can be read."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from baton.errors import TransferError
from baton.kv_transfer.types import Bytes
from baton.types import BlockHash

TIMEOUT_S = 120.0


class RedisGet:
    """``redis-py``: a pipeline of GET, or EXISTS, per request. Values stay in ``bytes`` objects of their own."""

    def __init__(self, port: int, *, exists: bool = False) -> None:
        self._client, self._exists = connect(port), exists

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Get; see :meth:`Method.once`."""
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            (pipeline.exists if self._exists else pipeline.get)(name)
        return sum(bool(value) for value in pipeline.execute())

    async def close(self) -> None:
        """Hang up."""
        self._client.close()


class RedisMget:
    """``redis-py``: one MGET per request."""

    def __init__(self, port: int) -> None:
        self._client = connect(port)

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Get; see :meth:`Method.once`."""
        return sum(value is not None for value in self._client.mget(list(names)))

    async def close(self) -> None:
        """Hang up."""
        self._client.close()


class RedisSet:
    """``redis-py``: a pipeline of SET per request, over and over the same keys, so that Redis' memory stays bounded.

    Args:
        port: Of the server.
        values: uint8 [blocks, block_bytes].
    """

    def __init__(self, port: int, values: Bytes) -> None:
        self._client, self._values = connect(port), values

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Set; see :meth:`Method.once`."""
        pipeline = self._client.pipeline(transaction=False)
        for i, name in enumerate(names):
            pipeline.set(b"put" + name, memoryview(self._values[i]))
        return sum(bool(done) for done in pipeline.execute())

    async def close(self) -> None:
        """Hang up."""
        self._client.close()


class BareGet:
    """GETs written to a bare socket ahead of their answers, which are received into the blocks themselves.

    No client library can be faster: nothing is parsed but lengths, nothing is copied, nothing is allocated.

    Args:
        port: Of the server.
        target: uint8 [blocks, block_bytes].
    """

    def __init__(self, port: int, target: Bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._target, self._size = target, target.shape[1]
        self._head = b"$%d\r\n" % self._size

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Get; see :meth:`Method.once`. Only for keys that are there."""
        self._socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names))
        head, tail = bytearray(len(self._head)), bytearray(2)
        for i in range(len(names)):
            views = [memoryview(head), memoryview(self._target[i]), memoryview(tail)]
            while views:
                got = self._socket.recvmsg_into(views)[0]
                if not got:
                    raise TransferError("Redis hung up")
                while views and got >= len(views[0]):
                    got -= len(views.pop(0))
                if views:
                    views[0] = views[0][got:]
            if head != self._head:
                raise TransferError(f"Redis answered {bytes(head)!r}")
        return len(names)

    async def close(self) -> None:
        """Hang up."""
        self._socket.close()


def connect(port: int) -> Any:
    """Return a client with a connection of its own."""
    import redis  # optional: asked for where the plan is made

    return redis.Redis(port=port, socket_timeout=TIMEOUT_S)
