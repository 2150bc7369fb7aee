"""Blocks in Redis, one server or a cluster: a string per block, under its kind and its hash.

    <prefix>:<fingerprint digest, hex>:<block hash, hex>

Commands of a batch go out in one pipeline. Redis bounds its own memory (``maxmemory`` with ``allkeys-lru``) or is kept
below a limit by the tier; what it drops is a miss.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from baton.errors import ConfigError
from baton.rpc.redis import UNREADABLE_URL
from baton.types import BlockHash
from baton_kvstore.tiers.remote import HEADER_BYTES, RemoteError, decode_kind
from baton_kvstore.types import KvFormat

T = TypeVar("T")
_NAME = re.compile(rb"([0-9a-f]{64}):([0-9a-f]{64})")
_TRIES = 8
"""Values read at most to record_owners what a kind is; some may be damaged."""
_RUN_ID = re.compile(rb"run_id:(\w+)")
_SCAN_COUNT = 1000
_DELETED_AT_ONCE = 256
MAX_VALUE_BYTES = 512 << 20
"""Maximum size of a string in Redis."""


@dataclass(frozen=True)
class RedisOptions:
    """Where Redis is. ``repr`` leaves out the URL, which may hold a password.

    Attributes:
        url: ``redis://``, ``rediss://`` or ``unix://`` URL; for a cluster, of any node.
        prefix: Prefix of all keys.
        cluster: Whether Redis runs as a cluster.
        ttl_s: Time to live of a value that is not written again, in seconds; 0: unlimited.
        timeout_s: Timeout of connecting and of every read, in seconds.
        connections: Maximum number of connections per server.
    """

    url: str = field(repr=False)
    prefix: str
    cluster: bool = False
    ttl_s: float = 0.0
    timeout_s: float = 1.0
    connections: int = 16


class RedisBackend:
    """See :class:`baton_kvstore.tiers.remote.Backend`. Connects when it is first asked something.

    Raises:
        ConfigError: The client is not installed, or the URL cannot be read.
    """

    def __init__(self, options: RedisOptions) -> None:
        try:
            import redis
            import redis.backoff
            import redis.cluster
            import redis.retry
        except ImportError as error:
            message = "--redis-url needs the Python package redis: pip install 'baton-serve[redis]'"
            raise ConfigError(message, field="redis_url") from error
        self._options = options
        self._errors = (redis.exceptions.RedisError, redis.exceptions.RedisClusterException, OSError)
        self._lost = (redis.exceptions.ConnectionError, ConnectionError)
        self._slow = redis.exceptions.TimeoutError
        self._full = redis.exceptions.OutOfMemoryError
        self._refused = redis.exceptions.ResponseError
        settings: dict[str, Any] = {
            "socket_timeout": options.timeout_s,
            "socket_connect_timeout": options.timeout_s,
            "max_connections": options.connections,
            "protocol": 2,
            "redis_connect_func": self._on_connect,
            "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        }
        try:
            redis.connection.parse_url(options.url)  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise ConfigError(f"--redis-url: {UNREADABLE_URL}", field="redis_url") from error
        made = redis.cluster.RedisCluster if options.cluster else redis.Redis
        self._connect: Callable[[], Any] = lambda: made.from_url(options.url, **settings)
        self._primaries = {"target_nodes": redis.cluster.RedisCluster.PRIMARIES} if options.cluster else {}
        self.on_new_server: Callable[[], None] = lambda: None
        self._run_ids: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._client: _Client | None = None
        self._closed = False

    def get(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> list[bytes | None]:
        return self._pipelined(lambda pipe, key: pipe.get(key), kind, hashes)

    def write(self, kind: KvFormat, hashes: Sequence[BlockHash], values: Sequence[bytes]) -> list[bool]:
        """Write values and return which were taken: all of them, unless Redis has no memory for more."""
        life = {"px": max(1, round(1000 * self._options.ttl_s))} if self._options.ttl_s else {}

        def call(client: Any) -> list[bool]:
            with client.pipeline(transaction=False) as pipe:
                for name, value in zip(hashes, values, strict=True):
                    pipe.set(self._key(kind, name), value, **life)
                results = pipe.execute(raise_on_error=False)
            failed = next((result for result in results if isinstance(result, Exception)), None)
            if failed is not None and not isinstance(failed, self._full):
                raise failed
            return [result is True for result in results]

        return self._call(call)

    def has(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> list[bool | None]:
        return [bool(count) for count in self._pipelined(lambda pipe, key: pipe.exists(key), kind, hashes)]

    def delete(self, kind: KvFormat, hashes: Sequence[BlockHash] | None) -> None:
        if hashes is not None:
            self._pipelined(lambda pipe, key: pipe.unlink(key), kind, hashes)
            return
        for keys in self._scan(f"{_escaped(self._options.prefix)}:{kind.key.hex()}:*", _DELETED_AT_ONCE):
            self._call(functools.partial(_unlink, keys))

    def scan(self) -> Iterator[tuple[KvFormat, list[BlockHash]]]:
        """Yield what is there; of each kind one value's beginning is read to know what it is."""
        kinds: dict[str, KvFormat | None] = {}
        tries: Counter[str] = Counter()
        start = len(self._options.prefix) + 1
        for keys in self._scan(f"{_escaped(self._options.prefix)}:*", _SCAN_COUNT):
            blocks: dict[KvFormat, list[BlockHash]] = {}
            for key in keys:
                parts = _NAME.fullmatch(key[start:])
                if parts is None:  # another application's
                    continue
                digest, name = (part.decode() for part in parts.groups())
                if kinds.get(digest) is None and tries[digest] < _TRIES:
                    tries[digest] += 1
                    kinds[digest] = self._kind(key)
                kind = kinds.get(digest)
                if kind is not None and kind.key.hex() == digest:
                    blocks.setdefault(kind, []).append(BlockHash(bytes.fromhex(name)))
            yield from blocks.items()

    def used_bytes(self) -> int | None:
        """Return the memory that Redis uses: of a cluster all its primaries together."""

        def call(client: Any) -> int:
            answer = client.info("memory", **self._primaries)
            parts = answer.values() if self._options.cluster and "used_memory" not in answer else [answer]
            return sum(int(part["used_memory"]) for part in parts)

        return self._call(call)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            used = self._client
            self._client = None
            idle = used is not None and not used.num_users
        if used is not None and idle:
            self._close_client(used)

    def _key(self, kind: KvFormat, name: BlockHash) -> str:
        return f"{self._options.prefix}:{kind.key.hex()}:{name.hex()}"

    def _kind(self, key: bytes) -> KvFormat | None:
        return decode_kind(self._call(lambda client: client.getrange(key, 0, HEADER_BYTES - 1)))

    def _pipelined(self, add: Callable[[Any, str], object], kind: KvFormat, hashes: Sequence[BlockHash]) -> list[Any]:
        def call(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                for name in hashes:
                    add(pipe, self._key(kind, name))
                return list(pipe.execute())

        return self._call(call) if hashes else []

    def _scan(self, pattern: str, at_once: int) -> Iterator[list[bytes]]:
        """Yield matching keys, over connections of their own: a scan lasts longer than a call."""
        keys: list[bytes] = []
        try:
            with self._connect() as client:
                for key in client.scan_iter(match=pattern, count=_SCAN_COUNT):
                    keys.append(key)
                    if len(keys) >= at_once:
                        yield keys
                        keys = []
        except self._errors as error:
            raise RemoteError(f"{type(error).__name__}: {error}") from error
        if keys:
            yield keys

    def _call(self, call: Callable[[Any], T]) -> T:
        """Run commands; where an idle connection turns out to be broken, once more on new ones.

        Raises:
            RemoteError: They failed; some may have been done.
        """
        for again in (True, False):
            try:
                with self._connected() as client:
                    return call(client)
            except self._errors as error:
                if not (again and isinstance(error, self._lost) and not isinstance(error, self._slow)):
                    raise RemoteError(f"{type(error).__name__}: {error}") from error
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        """Use the client of all threads.

        After a failure a new one is created, and the old one is closed by its last user: redis-py has no answer to
        a connection that is closed while another thread reads from it.
        """
        with self._lock:
            if self._closed:
                raise RemoteError("closed")
            if self._client is None:
                self._client = _Client(self._connect())
            used = self._client
            used.num_users += 1
        try:
            yield used.client
        except self._errors:
            with self._lock:
                if self._client is used:
                    self._client = None
            raise
        finally:
            with self._lock:
                used.num_users -= 1
                last = not used.num_users and self._client is not used
            if last:
                self._close_client(used)

    def _on_connect(self, connection: Any) -> None:
        """Make a new connection ready, and find out whether the server was restarted since the last one."""
        if not self._options.cluster:  # a cluster's client has done it
            connection.on_connect()
        try:
            connection.send_command("INFO", "server")
            run_id = _RUN_ID.search(connection.read_response())
        except self._refused:  # no right to ask: misses will tell
            return
        place = f"{getattr(connection, 'host', '')}:{getattr(connection, 'port', getattr(connection, 'path', ''))}"
        before = self._run_ids.get(place)
        self._run_ids[place] = run_id[1] if run_id else b""
        if before not in (None, self._run_ids[place]):
            self.on_new_server()

    def _close_client(self, used: _Client) -> None:
        with contextlib.suppress(*self._errors):
            used.client.close()


@dataclass(eq=False)
class _Client:
    client: Any
    num_users: int = 0


def _unlink(keys: Sequence[bytes], client: Any) -> None:
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.unlink(key)
        pipe.execute()


def _escaped(text: str) -> str:
    """Return a pattern that matches a text alone."""
    return "".join(f"\\{letter}" if letter in "*?[]\\^" else letter for letter in text)
