"""Redis as Baton's services use it: clients, a stream reader, signed registrations, and the watch of them.

An instance or KV store node registers with a key that has a time to live, and announces in a stream that it came or
left. Where the services have a token, the registration is signed with it: the key, the address, all other fields, and
the time (by Redis' clock) until which it is valid. Write access to Redis is therefore enough to delete registrations,
but not to forge, change, rename or replay one.

Redis may also hold more keys, longer names and longer values than can be read at a time. Each round therefore reads the
keys that were accepted before and those that the stream names, and a bounded number of all others, continuing where the
previous round stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

from baton.background import keep_running
from baton.config.secrets import shown_url
from baton.errors import BatonError, ConfigError, UnauthenticatedError
from baton.logs import Absence
from baton.rpc.channel import Backoff
from baton.rpc.service_token import Token

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.cluster import RedisCluster

log = logging.getLogger(__name__)

_Item = TypeVar("_Item")

# --- clients ---

COMMAND_TIMEOUT_S = 1.0
UNREADABLE_URL = "a URL of Redis must be redis://user:password@host:port/0, with %2F for / and %40 for @ in a password"
_CANCEL_AGAIN_S = 0.1


def open_redis(url: str, *, timeout_s: float = COMMAND_TIMEOUT_S, most: int = 0) -> Redis:
    """Open a client that neither retries nor waits long: callers have pauses of their own.

    Args:
        url: ``redis://`` or ``rediss://``.
        timeout_s: Seconds for a connection, and for each answer.
        most: Maximum bytes of an answer; more end the connection (:class:`AnswerTooLongError`). 0: unlimited.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """
    return cast("Redis", _open("Redis", url, timeout_s, retries=0, most=most))


def open_redis_cluster(url: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> RedisCluster:
    """Open a client of a cluster, like :func:`open_redis`; the named node supplies the others' addresses.

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
        client: object = getattr(redis.asyncio, kind).from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), retries),
            protocol=2,
            **({"parser_class": _bounded_parser(most)} if most else {}),
        )
    except ValueError as error:
        # The library's message may contain a part of the password.
        raise ConfigError(f"{UNREADABLE_URL}, got {shown_url(url)}", field="redis") from error
    return client


class AnswerTooLongError(Exception):
    """Redis answered with more bytes than the client reads; the rest was not read."""


def _bounded_parser(most: int) -> type:
    """Return a parser class for connections that read at most ``most`` bytes of an answer."""
    from redis._parsers import _AsyncRESP2Parser  # hiredis, where it is installed, would do as well

    class Reader:
        """asyncio's stream reader with a byte budget."""

        def __init__(self, stream: asyncio.StreamReader) -> None:
            self.stream = stream
            self.left = most

        def __getattr__(self, name: str) -> Any:
            return getattr(self.stream, name)

        async def readexactly(self, count: int) -> bytes:
            self.spend(count)
            return await self.stream.readexactly(count)

        async def readline(self) -> bytes:
            line = await self.stream.readline()
            self.spend(len(line))
            return line

        def spend(self, count: int) -> None:
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


def redis_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that a client raises when Redis is unreachable or answers with an error."""
    from redis.exceptions import RedisClusterException, RedisError

    return (RedisError, RedisClusterException, AnswerTooLongError, OSError, TimeoutError)


async def cancel_task(task: asyncio.Task[None]) -> None:
    """Cancel a task that uses a client, and wait for its end.

    The cancellation is repeated until the task ends: in Python 3.11 ``asyncio.wait_for``, which the client uses, may
    swallow it.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it as lost


async def redis_ms(redis: Redis) -> int:
    """Return Redis' own time, the one clock that all its users share, in milliseconds."""
    seconds, micros = await redis.time()
    return int(seconds) * 1000 + int(micros) // 1000


# --- streams ---

_ENTRIES = 256


class RedisStream:
    """Reads a stream's entries as they arrive.

    An entry that is too long for the client is skipped together with those read beside it: readers must not depend on
    every entry.

    Args:
        redis: Client opened with a bound on answers.
        key: Key of the stream.
        on_skipped: Called when an entry was too long.

    Attributes:
        position: Number of the last entry read.
    """

    def __init__(self, redis: Redis, key: str, on_skipped: Callable[[], None] | None = None) -> None:
        self._redis = redis
        self._key = key
        self._on_skipped = on_skipped
        self._at_once = _ENTRIES
        self.position: bytes | str = "0-0"

    async def skip_to_end(self) -> None:
        """Continue after the entries that are there now, by Redis' time, which is what entries are numbered by."""
        self.position = f"{await redis_ms(self._redis)}-0"

    async def read(self, block_ms: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return the next entries, number and fields; empty: none within ``block_ms``, or one was skipped."""
        try:
            answer: Any = await self._redis.xread({self._key: self.position}, count=self._at_once, block=block_ms)
        except AnswerTooLongError:
            if self._at_once == 1:
                await self.skip_to_end()
                if self._on_skipped is not None:
                    self._on_skipped()
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


# --- registrations: writing and signing one ---

LEASE_TTL_S = 10.0
"""Life of a registration; it is renewed three times as often."""
NEWS_LENGTH = 1024
_RETRY_S = 0.5
_SLACK_MS = 2000
"""Validity of a signature beyond its key's life: the key is written some time after it was signed."""
_PURPOSE = b"registration in Redis"


def instance_key(prefix: str, instance_id: str) -> str:
    """Return the key of an instance's registration."""
    return f"{prefix}:instance:{instance_id}"


def news_key(prefix: str) -> str:
    """Return the key of the stream that announces arriving and leaving instances."""
    return f"{prefix}:instances"


def store_node_key(prefix: str, name: str) -> str:
    """Return the key of a KV store node's registration."""
    return f"{prefix}:kvstore:{name}"


def store_news_key(prefix: str) -> str:
    """Return the key of the stream that announces arriving and leaving KV store nodes."""
    return f"{prefix}:kvstores"


def sign_registration(token: Token | None, key: str, fields: Mapping[str, str], now_ms: int) -> str:
    """Return the value of a registration's key; without a token it is just the fields.

    Args:
        token: Shared token of the services.
        key: Key that the value will be stored under.
        fields: Published fields, such as the address.
        now_ms: Redis' time, in milliseconds.
    """
    if token is None:
        return json.dumps(dict(fields))
    until_ms = now_ms + int(1000 * LEASE_TTL_S) + _SLACK_MS
    body = json.dumps({**fields, "key": key, "until_ms": until_ms})
    return json.dumps({"body": body, "mac": token.mac(_PURPOSE, body.encode()).hex()})


def read_registration(token: Token | None, key: str, value: bytes | str, now_ms: int) -> tuple[Mapping[str, Any], int]:
    """Return a registration's fields and the end of their validity (ms of Redis' time; 0: they are not signed).

    Args:
        token: Shared token of the services.
        key: Key that the value was read from.
        value: Value of the key.
        now_ms: Redis' time, in milliseconds.

    Raises:
        UnauthenticatedError: It is not signed with the token, or for another key, or has expired.
        ValueError: It cannot be read.
    """
    outer = json.loads(value)
    if not isinstance(outer, dict):
        raise ValueError("it is no object")
    body = outer.get("body")
    mac = outer.get("mac")
    if token is None:
        if mac is not None:
            raise UnauthenticatedError("it is signed with a token, and there is none here", field="token")
        return outer, 0
    if not (isinstance(body, str) and isinstance(mac, str)):
        raise UnauthenticatedError("it is not signed", field="token")
    if not token.verifies(_PURPOSE, body.encode(errors="replace"), bytes.fromhex(mac)):
        raise UnauthenticatedError("it is signed with another token, or was changed", field="token")
    fields = json.loads(body)
    if fields["key"] != key:
        raise UnauthenticatedError(f"it was signed for {fields['key']}", field="token")
    if not 0 <= fields["until_ms"] - now_ms <= 1000 * LEASE_TTL_S + 2 * _SLACK_MS:
        raise UnauthenticatedError("it is an old one", field="token")
    return fields, int(fields["until_ms"])


class RedisPresence:
    """Keeps a registration's key until :meth:`stop`, and announces its arrival and departure in a stream.

    Args:
        url: URL of Redis.
        key: Key of the registration.
        value: Published fields, such as the address.
        token: Shared token of the services, which signs the registration; ``None``: it is not signed.
        news: Key of the stream.
        name: Name of this instance or node in the stream.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(
        self, url: str, *, key: str, value: Mapping[str, str], token: Token | None, news: str, name: str
    ) -> None:
        self._redis = open_redis(url)
        self._key = key
        self._value = dict(value)
        self._token = token
        self._news = news
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._registered = False

    def start(self) -> None:
        """Begin to register in the background."""
        self._task = keep_running(self._run, "registration redis")

    async def stop(self) -> None:
        """Delete the key and announce the departure."""
        if self._task is not None:
            await cancel_task(self._task)
        with contextlib.suppress(*redis_errors()):  # the key's time to live ends it
            if self._registered:
                await self._redis.delete(self._key)
                await self._announce("left")
        await self._redis.aclose()

    async def _run(self) -> None:
        absence = Absence(log, "Redis answers again")
        while True:
            try:
                now_ms = await redis_ms(self._redis) if self._token is not None else 0
                value = sign_registration(self._token, self._key, self._value, now_ms)
                before = await self._redis.set(self._key, value, px=int(1000 * LEASE_TTL_S), get=True)
                if before is None:
                    await self._announce("came")
                    log.info("registered with Redis")
                absence.record_return()
                self._registered = True
                pause_s = LEASE_TTL_S / 3
            except redis_errors() as error:
                absence.record_failure("Redis is away: %s", error)
                pause_s = _RETRY_S
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.0))

    async def _announce(self, what: str) -> None:
        await self._redis.xadd(self._news, {"instance": self._name, "what": what}, maxlen=NEWS_LENGTH, approximate=True)


# --- registrations: reading those of others ---

MAX_KNOWN = 4096
"""Accepted registrations that each round reads again."""
_PER_ROUND = 2048
"""Other keys that a round reads."""
_PER_READ = 256
"""Keys per request."""
_SCANS_PER_ROUND = 64
"""SCAN requests of a round, each over ``_PER_READ`` keys of any kind."""
_MAX_BYTES = 16 * 1024
"""Bytes read of a registration, however long its value is."""
_MAX_NAME_BYTES = 512
MAX_ANSWER_BYTES = 1 << 20
"""Bound for Redis' answers: more than that many names or news have."""
_MAX_REPORTED = 64
_MAX_NEWS = 64
_NEWS_S = 0.8
_NEWS_PAUSE_S = 0.02
_NEXT_PART_S = 0.1
_WRONG_TYPE = "WRONGTYPE"
_SCAN = """
local found = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])
local keys = {}
for _, key in ipairs(found[2]) do
  if #key <= tonumber(ARGV[4]) then keys[#keys + 1] = key end
end
return {found[1], keys}
"""


class Registrations(Generic[_Item]):
    """Reads registrations; logs, once per change, those that are not accepted.

    Args:
        redis: Client.
        prefix: Prefix of the keys; the name follows.
        token: Shared token of the services; with one, registrations that it has not signed are skipped.
        parse: Reads the fields; raises a BatonError, or what reading JSON of another shape raises, if it cannot.
        on_refused: Called with the number of registrations that a read skipped.

    Attributes:
        redis: Client.
        complete: Whether every key that existed at first was read by now.
    """

    def __init__(
        self,
        redis: Redis,
        prefix: str,
        token: Token | None,
        parse: Callable[[Mapping[str, Any]], _Item],
        on_refused: Callable[[int], None],
    ) -> None:
        self.redis = redis
        self._prefix = prefix
        self._token = token
        self._parse = parse
        self._on_refused = on_refused
        self._scan = redis.register_script(_SCAN)
        self._latest: dict[str, int] = {}
        self._known: set[str] = set()
        self._cursor: bytes | int = 0
        self._reported: set[str] = set()
        self._reported_many = False
        self._any_wrong = False
        self._cut_short = False
        self.complete = False

    async def read(self) -> dict[str, _Item]:
        """Return registrations by name: those accepted before, and some more."""
        items = await self.read_named(self._known)
        self._known &= items.keys()
        before = self._known.copy()
        num_read = 0
        for _ in range(_SCANS_PER_ROUND):
            keys, is_last = await self._next_keys()
            names = [name for name in keys if name not in before]
            items |= await self.read_named(names)  # other tasks run meanwhile
            num_read += len(names)
            if is_last:
                self._end_round()
                break
            if num_read >= _PER_ROUND:
                self._report_many()
                break
        return items

    async def read_named(self, names: Collection[str]) -> dict[str, _Item]:
        """Return the accepted registrations among some names."""
        if not names:
            return {}
        now_ms = await redis_ms(self.redis) if self._token is not None else 0
        items: dict[str, _Item] = {}
        wrong: dict[str, str] = {}
        rest = list(names)
        for part in (rest[at : at + _PER_READ] for at in range(0, len(rest), _PER_READ)):
            for name, value in zip(part, await self._values(part), strict=True):
                if not value:  # it expired in between
                    continue
                try:
                    fields, until_ms = read_registration(self._token, self._prefix + name, value, now_ms)
                    if until_ms < self._latest.get(name, 0):
                        raise UnauthenticatedError("there was a later one", field="token")
                    items[name] = self._parse(fields)
                    self._latest[name] = until_ms
                except (BatonError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    wrong[name] = str(error)
        self._latest = {name: until for name, until in self._latest.items() if until >= now_ms > 0}
        self._known |= set(itertools.islice(items.keys() - self._known, max(0, MAX_KNOWN - len(self._known))))
        self._report_wrong(wrong)
        return items

    async def _next_keys(self) -> tuple[list[str], bool]:
        """Return some more names, and whether these were the last ones."""
        args = [self._cursor, f"{self._prefix}*", _PER_READ, _MAX_NAME_BYTES]
        self._cursor, keys = await self._scan(args=args)
        return [key.decode(errors="replace")[len(self._prefix) :] for key in keys], int(self._cursor) == 0

    async def _values(self, names: Sequence[str]) -> list[bytes]:
        """Return the values of keys, each cut at the longest registration; a missing one is empty."""
        async with self.redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.getrange(self._prefix + name, 0, _MAX_BYTES - 1)
            values = await pipeline.execute(raise_on_error=False)
        for error in values:
            if isinstance(error, Exception) and not str(error).startswith(_WRONG_TYPE):
                raise error
        return [value if isinstance(value, bytes) else b"" for value in values]

    def _end_round(self) -> None:
        if self._reported and not self._any_wrong:
            log.info("all registrations in Redis (%s*) are believed again", self._prefix)
            self._reported.clear()
        if not self._cut_short:
            self._reported_many = False
        self.complete = True
        self._any_wrong = False
        self._cut_short = False

    def _report_many(self) -> None:
        self._cut_short = True
        if not self._reported_many:
            self._reported_many = True
            log.warning(
                "Redis has more than %d keys %s* beside those that are believed: each look reads some of them",
                _PER_ROUND,
                self._prefix,
            )

    def _report_wrong(self, wrong: Mapping[str, str]) -> None:
        if wrong:
            self._any_wrong = True
            self._on_refused(len(wrong))
        for name, why in wrong.items():
            if name not in self._reported and len(self._reported) < _MAX_REPORTED:
                self._reported.add(name)
                log.warning("the registration %s%.64s in Redis is ignored: %s", self._prefix, name, why)


class RegistrationWatch(Generic[_Item]):
    """Follows the set of registered members.

    The stream's news are read as they arrive, all keys in rounds. A member is removed when it announces that it leaves,
    or when its key was missing for a whole lease during which Redis was reachable: an unreachable or restarted, empty
    Redis removes none.

    Args:
        registrations: Reads the keys.
        news: Key of the stream that announces arrivals and departures.
        what: Name of the members in the log, in the plural.
        round_s: Seconds between two rounds over all keys.
        now: Monotonic clock, in seconds.
        on_failure: Called after each failed attempt.
    """

    def __init__(
        self,
        registrations: Registrations[_Item],
        news: str,
        what: str,
        *,
        round_s: float,
        now: Callable[[], float] = time.monotonic,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self._registrations = registrations
        self._news = RedisStream(registrations.redis, news)
        self._what = what
        self._round_s = round_s
        self.now = now
        self._on_failure = on_failure
        self._seen: dict[str, tuple[_Item, float]] = {}
        self._since = 0.0

    async def run(self, on_members: Callable[[Collection[_Item]], None]) -> NoReturn:
        """Follow until cancelled.

        Args:
            on_members: Called with all current members after each read.
        """
        backoff = Backoff(1.0, random.Random())
        absence = Absence(log, "Redis answers again, the %s are followed", self._what)
        while True:
            try:
                await self._news.skip_to_end()
                self._since = self.now()  # before the read: while Redis was away no key counts as missing
                next_round = -1.0
                is_new = False
                while True:
                    if time.monotonic() >= next_round:
                        self._add(await self._registrations.read())
                        pause_s = self._round_s if self._registrations.complete else _NEXT_PART_S
                        next_round = time.monotonic() + pause_s
                        is_new = True
                    if is_new:
                        on_members([item for item, _ in self._seen.values()])
                    absence.record_return()
                    backoff.reset()
                    is_new = await self._read_news(next_round - time.monotonic())
            except redis_errors() as error:
                absence.record_failure("Redis is away, the %s found so far are kept: %s", self._what, error)
                self._on_failure()
            await asyncio.sleep(backoff.next_s())

    async def _read_news(self, wait_s: float) -> bool:
        """Wait for news and read the keys they name; ``False``: there were none for a while."""
        entries = await self._news.read(max(1, int(1000 * min(wait_s, _NEWS_S))))
        if not entries:
            return False
        names = {news.get(b"instance", b"")[:_MAX_NAME_BYTES].decode(errors="replace"): news for _, news in entries}
        few = dict(itertools.islice(names.items(), _MAX_NEWS))
        for name, news in few.items():
            if news.get(b"what") == b"left":
                self._seen.pop(name, None)
        self._add(await self._registrations.read_named(few))
        await asyncio.sleep(_NEWS_PAUSE_S)  # bounds the work however many news are written
        return True

    def _add(self, items: Mapping[str, _Item]) -> None:
        now = self.now()
        self._seen |= {name: (item, now) for name, item in items.items()}
        before = now - LEASE_TTL_S
        if self._since <= before:
            self._seen = {name: each for name, each in self._seen.items() if each[1] > before}
