"""Blocks in an object store, whichever fsspec knows: an object per block, named by its kind and its hash.

    <url>/<fingerprint digest, hex>/<first two digits of the hash>/<block hash, hex>

So every node finds a block by its name alone, without an index to share, and one block can be deleted or expire by the
bucket's own rules without touching another. Requests of a batch run side by side. Writes replace an object as a whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeoutError
from typing import Any, TypeVar

from baton.config.secrets import shown_url
from baton.errors import ConfigError
from baton.types import BlockHash
from baton_kvstore.tiers.remote import HEADER_BYTES, RemoteError, decode_kind
from baton_kvstore.types import KvFormat

T = TypeVar("T")
_NAME = re.compile(r"[0-9a-f]{64}")
_TRIES = 8
"""Objects read at most in a folder to record_owners what they are; some may be damaged."""
_DIGITS = 2
_LEVELS = 3
"""Folders above an object: those of its first digits and of its kind, and the root."""
_PROBES = 4
"""How much further a look-up looks each time it has found everything so far."""


class ObjectBackend:
    """See :class:`baton_kvstore.tiers.remote.Backend`.

    Args:
        url: As fsspec understands it: ``s3://bucket/folder``, ``gs://…``, ``file:///…``, ``memory://…``.
        timeout_s: Timeout of one call, in seconds, however many requests it makes.
        requests: Maximum number of concurrent requests.
        find_timeout_s: Timeout of a look-up, in seconds; default: ``timeout_s``.

    Raises:
        ConfigError: fsspec or its backend is not installed, or does not understand the URL.
    """

    def __init__(self, url: str, *, timeout_s: float, requests: int, find_timeout_s: float | None = None) -> None:
        try:
            import fsspec
        except ImportError as error:
            message = "--object-url needs the Python package fsspec: pip install 'baton-serve[object]'"
            raise ConfigError(message, field="object_url") from error
        try:
            # Listings that fsspec remembers would hide what other nodes wrote.
            file_system, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(
                f"--object-url {shown_url(url)} cannot be used: {str(error).replace(url, shown_url(url))}",
                field="object_url",
            ) from error
        self._fs: Any = file_system
        self._root = str(root).rstrip("/")
        self._is_local = "file" in _protocols(self._fs)
        self._timeout_s = timeout_s
        self._find_timeout_s = find_timeout_s or timeout_s
        self._pool = ThreadPoolExecutor(requests, thread_name_prefix="kvstore object request")
        self._closed = threading.Event()
        self.on_new_server: Callable[[], None] = lambda: None  # object stores keep what they have

    def get(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> list[bytes | None]:
        return self._each(lambda name: self._get(self._path(kind, name)), hashes)

    def write(self, kind: KvFormat, hashes: Sequence[BlockHash], values: Sequence[bytes]) -> list[bool]:
        """Write values; either all are taken or the call fails."""
        self._each(
            lambda item: self._write_object(self._path(kind, item[0]), item[1]), list(zip(hashes, values, strict=True))
        )
        return [True] * len(hashes)

    def has(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> list[bool | None]:
        """Look for a chain's first block, then for more and more of them at once, up to one that is not there."""
        flags: list[bool | None] = []
        count = 1
        ends = time.monotonic() + self._find_timeout_s
        while len(flags) < len(hashes) and all(flags):
            part = hashes[len(flags) : len(flags) + count]
            flags += self._each(lambda name: bool(self._fs.exists(self._path(kind, name))), part, ends)
            count *= _PROBES
        return flags + [None] * (len(hashes) - len(flags))

    def delete(self, kind: KvFormat, hashes: Sequence[BlockHash] | None) -> None:
        if hashes is not None:
            self._each(self._remove, [self._path(kind, name) for name in hashes])
            return
        for shard in self._list(f"{self._root}/{kind.key.hex()}"):
            self._each(self._remove, self._list(shard))

    def scan(self) -> Iterator[tuple[KvFormat, list[BlockHash]]]:
        """Yield what is there; of each kind one value's beginning is read to know what it is."""
        for folder in self._list(self._root):
            kind: KvFormat | None = None
            for shard in self._list(folder) if _NAME.fullmatch(_last(folder)) else []:
                paths = [path for path in self._list(shard) if _NAME.fullmatch(_last(path))]
                for path in paths[:_TRIES]:
                    (head,) = self._each(lambda path: self._get(path, HEADER_BYTES), [path])
                    kind = kind or decode_kind(head or b"")
                    if kind is not None:
                        break
                if kind is not None and kind.key.hex() == _last(folder):
                    yield kind, [BlockHash(bytes.fromhex(_last(path))) for path in paths]

    def used_bytes(self) -> int | None:
        return None  # unknown without listing everything

    def close(self) -> None:
        """Make no more requests; those that hang end with their connections."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _path(self, kind: KvFormat, name: BlockHash) -> str:
        digits = name.hex()
        return f"{self._root}/{kind.key.hex()}/{digits[:_DIGITS]}/{digits}"

    def _get(self, path: str, end: int | None = None) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(path) if end is None else self._fs.cat_file(path, start=0, end=end))
        except FileNotFoundError:
            return None

    def _write_object(self, path: str, value: bytes) -> None:
        if not self._is_local:
            self._fs.pipe_file(path, value)
            return
        # An object store shows an object when it is whole and safe; so must a file system.
        torn = f"{path}.{secrets.token_hex(8)}"
        self._fs.makedirs(self._fs._parent(path), exist_ok=True)
        try:
            self._fs.pipe_file(torn, value)
            _sync(torn)
            self._fs.mv(torn, path)
            folder = path
            for _ in range(_LEVELS):
                folder = self._fs._parent(folder)
                _sync(folder)
        except BaseException:
            self._remove(torn)
            raise

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def _list(self, path: str) -> list[str]:
        def ask(path: str) -> list[str]:
            with contextlib.suppress(FileNotFoundError):
                return [str(entry) for entry in self._fs.ls(path, detail=False)]
            return []

        (entries,) = self._each(ask, [path])
        return entries

    def _each(self, call: Callable[[Any], T], items: Iterable[Any], ends: float | None = None) -> list[T]:
        """Make requests side by side and wait for all.

        Raises:
            RemoteError: One failed, or they took too long.
        """
        started = time.monotonic()
        ends = started + self._timeout_s if ends is None else ends
        if self._closed.is_set():
            raise RemoteError("closed")
        asks = [self._pool.submit(call, item) for item in items]
        try:
            return [ask.result(max(0.0, ends - time.monotonic())) for ask in asks]
        except FuturesTimeoutError as error:
            raise RemoteError(f"no answer within {ends - started:.1f} s") from error
        except Exception as error:  # whatever a backend of fsspec raises
            raise RemoteError(f"{type(error).__name__}: {error}") from error
        finally:
            for ask in asks:
                ask.cancel()


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _sync(path: str) -> None:
    """Make a file, or the names in a folder, survive a crash of the host."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
