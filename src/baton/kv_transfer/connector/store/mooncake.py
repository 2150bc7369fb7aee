"""Mooncake Store as a whole store, where its package is installed.

Its master decides where values lie and which go; bytes move by its own transfer engine between the processes that
lend it memory. Its calls block, so they run in threads of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from baton.errors import ConfigError, TransferError

T = TypeVar("T")
_THREADS = 4
_BUFFER_BYTES = 64 << 20
_MAX_VALUE_BYTES = 16 << 20  # of the buffer, which several values share
_NO_ROOM = -200
_DEFAULTS = {"host": "127.0.0.1", "metadata": "P2PHANDSHAKE", "protocol": "tcp", "devices": "", "segment_bytes": "0"}


class MooncakeValues:
    """Values in a Mooncake Store; see :class:`Values`. The connection is made with the first call.

    Args:
        url: ``mooncake://host:port`` of its master. After a question mark may stand: ``host``, this host's address for
            others; ``metadata``, the metadata server; ``protocol``, ``tcp`` or ``rdma``; ``devices``;
            ``segment_bytes``, memory that this process lends to the store.

    Raises:
        ConfigError: The package is not installed, or the URL cannot be read.
    """

    kind = "mooncake"
    max_bytes = _MAX_VALUE_BYTES

    def __init__(self, url: str) -> None:
        self._options = mooncake_options(url)
        self.name = f"mooncake://{self._options['master']}"
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            message = f"kvstore: a Mooncake Store needs the package mooncake-transfer-engine[-non-cuda] ({error})"
            raise ConfigError(message, field="kvstore") from error
        self._make: Callable[[], Any] = MooncakeDistributedStore
        self._store: Any = None
        self._lock = asyncio.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "baton-mooncake")

    async def renew(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are there."""
        names = _names(keys)
        answers = await self._call(lambda store: store.batch_is_exist(names))
        return [_checked(answer) == 1 for answer in answers]

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return values; one that cannot be had counts as missing."""
        names = _names(keys)

        def get(store: Any) -> list[bytes]:
            found: list[bytes] = store.get_batch(names)
            if found and not found[0]:  # missing, or the master is away: this tells
                _checked(store.is_exist(names[0]))
            return found

        return [answer or None for answer in await self._call(get)]

    async def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Keep values."""
        names = _names([key for key, _ in items])

        def put(store: Any) -> list[int]:
            return [store.put(name, value) for name, (_, value) in zip(names, items, strict=True)]

        answers = await self._call(put)
        return [answer != _NO_ROOM and _checked(answer) == 0 for answer in answers]

    async def close(self) -> None:
        """Leave the store. Calls that no caller waits for any more end first."""

        def end() -> None:
            self._threads.shutdown()
            if self._store is not None:
                self._store.close()
                self._store = None

        await asyncio.to_thread(end)

    async def _call(self, work: Callable[[Any], T]) -> T:
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._store is None:
                self._store = await asyncio.shield(loop.run_in_executor(self._threads, self._connect))
        return await loop.run_in_executor(self._threads, work, self._store)

    def _connect(self) -> Any:
        options, store = self._options, self._make()
        code = store.setup(
            options["host"],
            options["metadata"],
            int(options["segment_bytes"]),
            _BUFFER_BYTES,
            options["protocol"],
            options["devices"],
            options["master"],
        )
        if code:
            raise TransferError(f"{self.name} was not reached: error {code}")
        return store


def mooncake_options(url: str) -> dict[str, str]:
    """Read a URL.

    Raises:
        ConfigError: It cannot be read; says why.
    """
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or port is None or parts.path not in ("", "/"):
        raise ConfigError(f"kvstore: {url} is not mooncake://host:port of a master", field="kvstore")
    unknown = set(given) - set(_DEFAULTS)
    if unknown:
        raise ConfigError(f"kvstore: {sorted(unknown)[0]} is no option of mooncake://", field="kvstore")
    options = {**_DEFAULTS, **given, "master": parts.netloc}
    if not options["segment_bytes"].isdigit():
        raise ConfigError("kvstore: segment_bytes is a number of bytes", field="kvstore")
    return options


def _names(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _checked(code: int) -> int:
    if code < 0:
        raise TransferError(f"Mooncake Store failed: error {code}")
    return code
