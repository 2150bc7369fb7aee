"""A Redis client as Baton's services use it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from baton.config.secrets import shown_url
from baton.errors import ConfigError

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.cluster import RedisCluster

COMMAND_TIMEOUT_S = 1.0
UNREADABLE_URL = "a URL of Redis must be redis://user:password@host:port/0, with %2F for / and %40 for @ in a password"
_ASK_AGAIN_S = 0.1
_ENTRIES = 256


def open_redis(url: str, *, timeout_s: float = COMMAND_TIMEOUT_S, most: int = 0) -> Redis:
    """Open a client that neither retries nor waits long: whoever uses it has pauses of its own.

    Args:
        url: ``redis://`` or ``rediss://``.
        timeout_s: Seconds for a connection, and for each answer.
        most: Bytes that an answer may have; more end the connection (:class:`AnswerTooLongError`). 0: any number.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """
    return cast("Redis", _open("Redis", url, timeout_s, retries=0, most=most))


def open_redis_cluster(url: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> RedisCluster:
    """Open a client of a cluster, like :func:`open_redis`; the others' addresses come from the node that is named.

    Args:
        url: ``redis://`` or ``rediss://`` of any node.
        timeout_s: Seconds for a connection, and for each answer.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """
    # One retry is for a slot that has moved.
    return cast("RedisCluster", _open("RedisCluster", url, timeout_s, retries=1))


def _open(kind: str, url: str, timeout_s: float, *, retries: int, most: int = 0) -> object:
    try:
        import redis.asyncio
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        message = "this needs the Python package redis: pip install 'baton-serve[redis]'"
        raise ConfigError(message, field="redis") from error
    try:
        opened: object = getattr(redis.asyncio, kind).from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), retries),
            protocol=2,
            **({"parser_class": _bounded_parser(most)} if most else {}),
        )
    except ValueError as error:
        # What the library says may have a part of the password in it.
        raise ConfigError(f"{UNREADABLE_URL}, got {shown_url(url)}", field="redis") from error
    return opened


class AnswerTooLongError(Exception):
    """Redis answered with more than was to be read; the rest was not."""


def _bounded_parser(most: int) -> type:
    """Return the parser of a connection that reads so many bytes of an answer and no more."""
    from redis._parsers import _AsyncRESP2Parser  # hiredis, where it is installed, would do as well

    class Reader:
        """What the parser reads from: asyncio's, with a count."""

        def __init__(self, stream: asyncio.StreamReader) -> None:
            self.stream = stream
            self.left = most

        def __getattr__(self, name: str) -> Any:
            return getattr(self.stream, name)

        async def readexactly(self, count: int) -> bytes:
            self.take(count)
            return await self.stream.readexactly(count)

        async def readline(self) -> bytes:
            line = await self.stream.readline()
            self.take(len(line))
            return line

        def take(self, count: int) -> None:
            self.left -= count
            if self.left < 0:
                raise AnswerTooLongError(f"Redis answered with more than {most} bytes")

    base: Any = _AsyncRESP2Parser

    class Parser(base):  # type: ignore[misc]
        def on_connect(self, connection: Any) -> None:
            base.on_connect(self, connection)
            self._stream: Any = Reader(self._stream)

        async def read_response(self, *args: Any, **options: Any) -> Any:
            self._stream.left = most
            return await super().read_response(*args, **options)

    return Parser


class RedisStream:
    """Reads a stream's entries as they come.

    One that is too long for the client is passed over, and what came with it: nobody may count on every entry.

    Args:
        redis: Opened with a bound.
        key: The stream.
        passed_over: Hears that an entry was too long.

    Attributes:
        position: The last entry that was read.
    """

    def __init__(self, redis: Redis, key: str, passed_over: Callable[[], None] | None = None) -> None:
        self._redis = redis
        self._key = key
        self._passed_over = passed_over
        self._at_once = _ENTRIES
        self.position: bytes | str = "0-0"

    async def to_end(self) -> None:
        """Begin behind what is there now, by the time, which is what entries are numbered by."""
        self.position = f"{await redis_ms(self._redis)}-0"

    async def read(self, block_ms: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return the next entries, number and fields; empty: none came for so long, or one was passed over."""
        try:
            answer: Any = await self._redis.xread({self._key: self.position}, count=self._at_once, block=block_ms)
        except AnswerTooLongError:
            if self._at_once == 1:
                await self.to_end()
                if self._passed_over is not None:
                    self._passed_over()
            self._at_once = 1
            return []
        except redis_errors():
            self._at_once = 1  # it may have been too much to be sent in time
            raise
        self._at_once = min(_ENTRIES, 2 * self._at_once)
        if not answer:
            return []
        ((_, entries),) = answer.items() if isinstance(answer, dict) else answer
        self.position = entries[-1][0]
        return [(number, fields or {}) for number, fields in entries]


def redis_errors() -> tuple[type[Exception], ...]:
    """Return what a client raises when Redis is away or answers with an error."""
    from redis.exceptions import RedisClusterException, RedisError

    return (RedisError, RedisClusterException, AnswerTooLongError, OSError, TimeoutError)


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel a task that uses a client, and wait for its end.

    It is asked again until it ends: in Python 3.11 ``asyncio.wait_for``, which the client uses, may swallow it.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_ASK_AGAIN_S)
    if not task.cancelled():
        task.exception()  # looked at: nobody else will


async def redis_ms(redis: Redis) -> int:
    """Return Redis' own time, the one clock that all who use it share, in milliseconds."""
    seconds, micros = await redis.time()
    return int(seconds) * 1000 + int(micros) // 1000
