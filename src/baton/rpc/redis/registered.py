"""Who is registered in Redis, as it changes: keys that are believed, looked for in bounded parts.

Whoever can write to Redis can write more keys, longer names and longer values than anybody could read at a time. So a
look reads those that were believed before and those that news name, and of all others a bounded number, where the one
before left off.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from baton.errors import BatonError, UnauthenticatedError
from baton.logs import Absence
from baton.rpc.channel import Backoff
from baton.rpc.redis.client import RedisStream, redis_errors, redis_ms
from baton.rpc.redis.registrations import LEASE_TTL_S, read_registration
from baton.rpc.service_token import Token

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)

MAX_KNOWN = 4096
"""Registrations that each look reads again."""
_PER_LOOK = 2048
_PER_READ = 256
_SCANS_PER_LOOK = 64
"""Other keys of a look, keys that are read at a time, and requests for their names: ``_PER_READ`` keys of any kind."""
_MAX_BYTES = 16 * 1024
"""Of a registration, whatever stands in Redis."""
_MAX_NAME_BYTES = 512
MAX_ANSWER_BYTES = 1 << 20
"""Of Redis: more than so many names or news have."""
_MAX_TOLD = 64
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
_Item = TypeVar("_Item")


class Registrations(Generic[_Item]):
    """Reads what is registered, and tells, once per change, of what is not believed.

    Args:
        redis: Where.
        prefix: Of the keys; the name follows.
        token: The services'; with one, what it has not signed is passed over.
        parse: Reads the fields; raises a BatonError, or what reading JSON of another shape raises, if it cannot.
        refused: Hears how many a look passed over.

    Attributes:
        redis: Where.
        whole: Whether every key that there was at first was looked at by now.
    """

    def __init__(
        self,
        redis: Redis,
        prefix: str,
        token: Token | None,
        parse: Callable[[Mapping[str, Any]], _Item],
        refused: Callable[[int], None],
    ) -> None:
        self.redis = redis
        self._prefix = prefix
        self._token = token
        self._parse = parse
        self._refused = refused
        self._scan = redis.register_script(_SCAN)
        self._latest: dict[str, int] = {}
        self._known: set[str] = set()
        self._cursor: bytes | int = 0
        self._told: set[str] = set()
        self._told_many = self._any_wrong = self._cut = False
        self.whole = False

    async def read(self) -> dict[str, _Item]:
        """Return who is registered, by name: of those who were before, and of some more."""
        found = await self.read_named(self._known)
        self._known &= found.keys()
        before = self._known.copy()
        num_read = 0
        for _ in range(_SCANS_PER_LOOK):
            keys, is_over = await self._next_keys()
            names = [name for name in keys if name not in before]
            found |= await self.read_named(names)  # others have their turn meanwhile
            num_read += len(names)
            if is_over:
                self._end_round()
                break
            if num_read >= _PER_LOOK:
                self._tell_many()
                break
        return found

    async def read_named(self, names: Collection[str]) -> dict[str, _Item]:
        """Return who of some is registered."""
        if not names:
            return {}
        now_ms = await redis_ms(self.redis) if self._token is not None else 0
        found: dict[str, _Item] = {}
        wrong: dict[str, str] = {}
        rest = list(names)
        for part in (rest[at : at + _PER_READ] for at in range(0, len(rest), _PER_READ)):
            for name, value in zip(part, await self._values(part), strict=True):
                if not value:  # its time ended in between
                    continue
                try:
                    fields, until_ms = read_registration(self._token, self._prefix + name, value, now_ms)
                    if until_ms < self._latest.get(name, 0):
                        raise UnauthenticatedError("there was a later one", field="token")
                    found[name] = self._parse(fields)
                    self._latest[name] = until_ms
                except (BatonError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    wrong[name] = str(error)
        self._latest = {name: until for name, until in self._latest.items() if until >= now_ms > 0}
        self._known |= set(itertools.islice(found.keys() - self._known, max(0, MAX_KNOWN - len(self._known))))
        self._tell(wrong)
        return found

    async def _next_keys(self) -> tuple[list[str], bool]:
        """Return the names of some keys more, and whether these were the last ones."""
        args = [self._cursor, f"{self._prefix}*", _PER_READ, _MAX_NAME_BYTES]
        self._cursor, keys = await self._scan(args=args)
        return [key.decode(errors="replace")[len(self._prefix) :] for key in keys], int(self._cursor) == 0

    async def _values(self, names: Sequence[str]) -> list[bytes]:
        """Return what stands under keys, of each no more than a registration can have; nothing: empty."""
        async with self.redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.getrange(self._prefix + name, 0, _MAX_BYTES - 1)
            values = await pipeline.execute(raise_on_error=False)
        for error in values:
            if isinstance(error, Exception) and not str(error).startswith(_WRONG_TYPE):
                raise error
        return [value if isinstance(value, bytes) else b"" for value in values]

    def _end_round(self) -> None:
        if self._told and not self._any_wrong:
            log.info("all registrations in Redis (%s*) are believed again", self._prefix)
            self._told.clear()
        if not self._cut:
            self._told_many = False
        self.whole = True
        self._any_wrong = False
        self._cut = False

    def _tell_many(self) -> None:
        self._cut = True
        if not self._told_many:
            self._told_many = True
            log.warning(
                "Redis has more than %d keys %s* beside those that are believed: each look reads some of them",
                _PER_LOOK,
                self._prefix,
            )

    def _tell(self, wrong: Mapping[str, str]) -> None:
        if wrong:
            self._any_wrong = True
            self._refused(len(wrong))
        for name, why in wrong.items():
            if name not in self._told and len(self._told) < _MAX_TOLD:
                self._told.add(name)
                log.warning("the registration %s%.64s in Redis is ignored: %s", self._prefix, name, why)


class RegistrationWatch(Generic[_Item]):
    """Follows who is registered.

    News are looked at as they come, and all keys in turns. Somebody is forgotten when he says that he leaves, or when
    his key was missing for a whole lease during which Redis was there: so a Redis that is away, or comes back empty,
    takes nothing away.

    Args:
        registrations: Reads the keys.
        news: Key of the stream that tells who came and who left.
        what: What to call them in the log.
        look_s: Seconds between two looks at keys that no news names.
        now: Monotonic clock.
        failed: Hears of each try that failed.
    """

    def __init__(
        self,
        registrations: Registrations[_Item],
        news: str,
        what: str,
        *,
        look_s: float,
        now: Callable[[], float] = time.monotonic,
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        self._registrations = registrations
        self._news = RedisStream(registrations.redis, news)
        self._what = what
        self._look_s = look_s
        self.now = now
        self._failed = failed
        self._seen: dict[str, tuple[_Item, float]] = {}
        self._since = 0.0

    async def run(self, take: Callable[[Collection[_Item]], None]) -> NoReturn:
        """Follow until cancelled.

        Args:
            take: Is told who there is, after each look.
        """
        backoff = Backoff(1.0, random.Random())
        absence = Absence(log, "Redis answers again, the %s are followed", self._what)
        while True:
            try:
                await self._news.to_end()
                self._since = self.now()  # before the look: while Redis was away no key counts as missing
                next_look = -1.0
                is_new = False
                while True:
                    if time.monotonic() >= next_look:
                        self._add(await self._registrations.read())
                        next_look = time.monotonic() + (self._look_s if self._registrations.whole else _NEXT_PART_S)
                        is_new = True
                    if is_new:
                        take([item for item, _ in self._seen.values()])
                    absence.ended()
                    backoff.reset()
                    is_new = await self._look_at_news(next_look - time.monotonic())
            except redis_errors() as error:
                absence.failed("Redis is away, the %s found so far are kept: %s", self._what, error)
                self._failed()
            await asyncio.sleep(backoff.next_s())

    async def _look_at_news(self, wait_s: float) -> bool:
        """Wait for news, and look at those they name; ``False``: there were none for a while."""
        entries = await self._news.read(max(1, int(1000 * min(wait_s, _NEWS_S))))
        if not entries:
            return False
        names = {news.get(b"instance", b"")[:_MAX_NAME_BYTES].decode(errors="replace"): news for _, news in entries}
        few = dict(itertools.islice(names.items(), _MAX_NEWS))
        for name, news in few.items():
            if news.get(b"what") == b"left":
                self._seen.pop(name, None)
        self._add(await self._registrations.read_named(few))
        await asyncio.sleep(_NEWS_PAUSE_S)  # however many write news
        return True

    def _add(self, found: Mapping[str, _Item]) -> None:
        now = self.now()
        self._seen |= {name: (item, now) for name, item in found.items()}
        before = now - LEASE_TTL_S
        if self._since <= before:
            self._seen = {name: each for name, each in self._seen.items() if each[1] > before}
