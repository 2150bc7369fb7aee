"""Blocks in files that instances share: a directory on a common file system as a store, without any service.

A block is a safetensors file: K and V of every layer as tensors; the metadata holds the fingerprint, the block hash and
a checksum. The bytes after the header are the block's own, undivided and without padding, so reading and writing copy
nothing. The header of a block is known before its file is read, all but the checksum: a file that begins otherwise is
damaged, or another application's.

A file gets its name by a rename when it is complete, so a partial one is never read. Each process adds up what it
writes and scans the whole directory now and then; if it holds too much, the least recently used files are removed.
Processes need not know each other: a file that another process removed is a miss. Prompts can be inferred from KV, so
files and folders are readable by their owner only: processes that share them run as one user.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import logging
import math
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from baton.config.secrets import require_own_folder
from baton.errors import ConfigError, DeadlineError, PipeClosedError, QueueFullError, TransferError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import DTYPE_BYTES, SCALE_BYTES, KVLayout
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.blocks import FetchResult
from baton.kv_transfer.blocks.fetcher import settle
from baton.kv_transfer.connector.store.backend import LoadCall, SaveCall, SaveResult, StoreBackend, num_leading
from baton.kv_transfer.connector.store.host_memory import StagingLanes
from baton.types import BlockHash, BlockId

log = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT = "baton-kv-block-1"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8", "fp8_e4m3": "F8_E4M3"}
_CHECKSUM = "xxh3_128"
_NO_CHECKSUM = "0" * 32
_SUFFIX = ".safetensors"
_PART = ".part"
_TOUCH_S = 60.0
"""A file's time of last use is updated at most this often: LRU to the minute, without a write per read."""
_LOST_S = 600.0
"""Age from which a partial file belongs to a process that died."""
_RESCAN_SHARE = 0.05
"""Share of the limit that this process may write before it scans what others wrote."""
_KEEP_SHARE = 0.9
"""Share of the limit that is kept when files are removed."""
_AHEAD = 3
"""Lanes that one load may fill and empty at the same time."""
_CLOSE_S = 5.0
"""How long closing waits for running reads and writes."""


class DamagedFileError(Exception):
    """A file does not hold the block that its name says."""


class BlockFormat:
    """File format of the blocks of one kind of KV.

    Args:
        whole: Fingerprint of the blocks, undivided.

    Attributes:
        num_bytes: Size of a block's tensors in bytes.
    """

    def __init__(self, whole: Fingerprint) -> None:
        layout = KVLayout(whole.layer_shapes, whole.block_size, whole.kv_dtype)
        tensors: dict[str, Any] = {}
        self.num_bytes = 0
        for layer, (shape, place) in enumerate(zip(layout.layers, layout.places, strict=True)):
            rows = [shape.kv_heads, layout.block_size]
            parts = (
                ("k", place.k, _DTYPES[place.dtype], [*rows, shape.k_dim], DTYPE_BYTES[place.dtype]),
                ("v", place.v, _DTYPES[place.dtype], [*rows, shape.v_dim], DTYPE_BYTES[place.dtype]),
                ("k_scales", place.k_scales, "BF16", rows, SCALE_BYTES),
                ("v_scales", place.v_scales, "BF16", rows, SCALE_BYTES),
            )
            for name, at, dtype, dims, unit in parts:
                size = math.prod(dims) * unit
                if at < 0 or not size or (name == "v_scales" and not shape.v_dim):
                    continue
                if at != self.num_bytes:  # safetensors has no holes between tensors
                    kind = f"{whole.kv_dtype} with {layout.block_size} tokens per block"
                    raise ConfigError(f"KV of {kind} has gaps that block files cannot have", field="kv_dtype")
                tensors[f"layers.{layer}.{name}"] = {"dtype": dtype, "shape": dims, "data_offsets": [at, at + size]}
                self.num_bytes = at + size
        self._template = _template(whole.digest().hex(), tensors)
        self._header_bytes = len(self._header(BlockHash(bytes(32)), _NO_CHECKSUM))

    @property
    def file_bytes(self) -> int:
        """Size of a file in bytes."""
        return self._header_bytes + self.num_bytes

    def read(self, path: Path, name: BlockHash, into: npt.NDArray[np.uint8]) -> float:
        """Fill a slot from a file and return the file's time of last use, in seconds of the epoch.

        Args:
            path: The file.
            name: Hash of the block that it should hold.
            into: Slot to fill, uint8 [block bytes]; if this raises, its content is undefined.

        Raises:
            DamagedFileError: Size, header or checksum are wrong.
            OSError: The file does not exist or cannot be read.
        """
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DamagedFileError("it is no file")
            if status.st_size != self.file_bytes:
                raise DamagedFileError(f"{status.st_size} bytes instead of {self.file_bytes}")
            header = file.read(self._header_bytes)
            data = into[: self.num_bytes].data
            at = 0
            while at < self.num_bytes and (count := file.readinto(data[at:])):
                at += count
        if at != self.num_bytes or header != self._header(name, xxhash.xxh3_128_hexdigest(data)):
            raise DamagedFileError("header or checksum are wrong")
        return status.st_mtime

    def write(self, path: Path, name: BlockHash, block: npt.NDArray[np.uint8], *, sync: bool) -> None:
        """Write a new file.

        Args:
            path: The file, which must not exist.
            name: Hash of the block.
            block: Content of the block, uint8 [block bytes].
            sync: Return only when the file would survive a loss of power.

        Raises:
            OSError: The file could not be written completely.
        """
        data = block[: self.num_bytes].data
        pieces = [memoryview(self._header(name, xxhash.xxh3_128_hexdigest(data))), data]
        with open(path, "xb", buffering=0, opener=_open_private) as file:
            for piece in pieces:
                at = 0
                while at < len(piece):
                    at += file.write(piece[at:])
            if sync:
                os.fsync(file.fileno())

    def _header(self, name: BlockHash, checksum: str) -> bytes:
        return self._template % (name.hex().encode(), checksum.encode())


def _template(digest: str, tensors: dict[str, Any]) -> bytes:
    """Return a header with placeholders for the block hash and the checksum, 64 and 32 hexadecimal characters."""
    metadata = {"format": FORMAT, "fingerprint": digest, "block_hash": "%b", _CHECKSUM: "%b"}
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
    length = len(text % (b"0" * 64, b"0" * 32))
    padding = -length % 8
    return (length + padding).to_bytes(8, "little").replace(b"%", b"%%") + text + b" " * padding


class BlockFolder:
    """The files of one kind of KV in a directory. All methods block and are thread safe.

    Args:
        path: The directory, created if missing; it may hold blocks of other kinds, which count towards the limit.
        whole: Fingerprint of the blocks, undivided.
        max_bytes: Limit for all block files in ``path``; each of several writers may exceed it by a twentieth.
        sync: Write files so that they survive a loss of power.

    Attributes:
        num_damaged: Number of damaged files, which were removed.
        num_evicted: Number of files removed to make room.

    Raises:
        ConfigError: The directory cannot be used, or is too small for a block.
    """

    def __init__(self, path: Path, whole: Fingerprint, *, max_bytes: int, sync: bool) -> None:
        self._format = BlockFormat(whole)
        if max_bytes < 2 * self._format.file_bytes:
            message = f"{max_bytes} bytes are too few for blocks of {self._format.file_bytes}"
            raise ConfigError(message, field="kv_connector_options")
        self.path = path
        self._folder = path / f"{FORMAT}-{whole.digest().hex()[:32]}"
        self._max_bytes = max_bytes
        self._sync = sync
        self._lock = threading.Lock()
        self._scan = threading.Lock()
        self._used = self._unseen = 0
        self._scanned = False
        self.num_damaged = self.num_evicted = 0
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            require_own_folder(self._folder, self._folder, "kv_connector_options")
            _make_private(self._folder)
        except OSError as error:
            message = f"{path} cannot be used: {error.strerror}"
            raise ConfigError(message, field="kv_connector_options") from error

    @property
    def used_bytes(self) -> int:
        """Size of all files in bytes, as far as this process knows."""
        return self._used

    @property
    def num_bytes(self) -> int:
        """Size of a block's tensors in bytes."""
        return self._format.num_bytes

    def holds(self, name: BlockHash) -> bool:
        """Return whether a block's file exists, damaged or not; counts as a use.

        Raises:
            TransferError: The file system failed.
        """
        file = self._file(name)
        try:
            self._touch(file, file.stat().st_mtime)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise TransferError(f"{file} cannot be looked at: {error.strerror}") from error
        return True

    def read(self, name: BlockHash, into: npt.NDArray[np.uint8]) -> bool:
        """Fill a slot; ``False``: the file does not exist, or was damaged and is now removed.

        Raises:
            TransferError: The file system failed.
        """
        file = self._file(name)
        try:
            self._touch(file, self._format.read(file, name, into))
        except FileNotFoundError:
            return False
        except DamagedFileError as error:
            log.error("%s is damaged and removed: %s", file, error)
            self.num_damaged += 1
            self._remove(file, self._format.file_bytes)
            return False
        except OSError as error:
            raise TransferError(f"{file} cannot be read: {error.strerror}") from error
        return True

    def write(self, name: BlockHash, block: npt.NDArray[np.uint8]) -> int:
        """Write a missing block, making room for it; returns the number of bytes written.

        Raises:
            QueueFullError: The file system is full.
            TransferError: The file system failed.
        """
        file = self._file(name)
        part = file.with_name(f"{file.stem}.{secrets.token_hex(8)}{_PART}")
        try:
            file.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                self._format.write(part, name, block, sync=self._sync)
                part.rename(file)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            if self._sync:
                _sync_folder(file.parent)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise QueueFullError(f"no room in {self.path}", retry_after_s=1.0) from error
            raise TransferError(f"{file} cannot be written: {error.strerror}") from error
        size = self._format.file_bytes
        with self._lock:
            self._used += size
            self._unseen += size
            due = self._used > self._max_bytes or self._unseen > _RESCAN_SHARE * self._max_bytes or not self._scanned
        if due:
            self.sweep()
        return size

    def sweep(self) -> None:
        """Scan the directory, and remove the least recently used files if they are too many."""
        if not self._scan.acquire(blocking=False):
            return  # another thread is scanning
        try:
            with self._lock:
                self._unseen = 0
            files = sorted(self._files())
            used = sum(size for _, size, _ in files)
            left = _KEEP_SHARE * self._max_bytes if used > self._max_bytes else used
            for _, size, path in files:
                if used <= left:
                    break
                self.num_evicted += self._remove(Path(path), 0)
                used -= size
            with self._lock:
                self._used = used + self._unseen
                self._scanned = True
        finally:
            self._scan.release()

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield time of last use, size and path of every block file; remove lost partial files on the way."""
        lost = time.time() - _LOST_S
        for kind in _entries(self.path):
            if not kind.name.startswith(FORMAT):
                continue
            for group in _entries(Path(kind.path)):
                for file in _entries(Path(group.path)):
                    try:
                        status = file.stat()
                    except OSError:  # removed meanwhile
                        continue
                    if file.name.endswith(_SUFFIX):
                        yield status.st_mtime, status.st_size, file.path
                    elif file.name.endswith(_PART) and status.st_mtime < lost:
                        self._remove(Path(file.path), 0)

    def _file(self, name: BlockHash) -> Path:
        text = name.hex()
        return self._folder / text[:2] / f"{text}{_SUFFIX}"

    def _touch(self, file: Path, used_at: float) -> None:
        if time.time() - used_at > _TOUCH_S:
            os.utime(file)

    def _remove(self, file: Path, size: int) -> bool:
        try:
            file.unlink()
        except OSError as error:
            if error.errno != errno.ENOENT:
                log.error("%s cannot be removed: %s", file, error)
            return False
        with self._lock:
            self._used -= size
        return True


@dataclass(eq=False)
class _Lane:
    """Slots of a lane, and the jobs in threads that use them."""

    slots: list[int]
    jobs: list[Future[Any]] = field(default_factory=list)


class FileStore(StoreBackend):
    """A directory as a store. Files are read and written in threads.

    A file system that hangs costs a transfer its deadline: the lane that a hanging thread uses becomes free with that
    thread, which never touches the pool.

    Args:
        folder: The files.
        pool: The instance's KV pool.
        fingerprint: Fingerprint of the pool's blocks.
        threads: Number of files that are read or written at once.
        blocks_per_call: Largest number of blocks in a lane.
        stored: Fingerprint of the files' blocks; default: that of the pool, undivided.
    """

    def __init__(
        self,
        folder: BlockFolder,
        pool: KVShards,
        fingerprint: Fingerprint,
        *,
        threads: int,
        blocks_per_call: int,
        stored: Fingerprint | None = None,
    ) -> None:
        self.name = str(folder.path)
        self._folder = folder
        self._num_threads = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kv files")
        self._lanes = StagingLanes(pool, fingerprint, max_blocks=blocks_per_call, stored=stored)
        self._running: set[Future[Any]] = set()

    async def save(self, call: SaveCall) -> SaveResult:
        """Write the missing blocks. The call's source is this instance's pool and is not needed."""
        names = list(call.part.wanted)
        lanes = self._lanes
        held = await self._map_in_threads(self._folder.holds, [(name,) for name in names], call.deadline, [])
        missing = [i for i, is_held in enumerate(held) if not is_held]
        num_written = 0
        for start in range(0, len(missing), lanes.lane_blocks):
            piece = missing[start : start + lanes.lane_blocks]
            async with self._lane(call.deadline) as lane:
                valid = await lanes.collect(call, piece, lane.slots)
                pairs = zip(piece, lane.slots, valid, strict=False)
                complete = [(names[i], lanes.arena.blocks[slot]) for i, slot, ok in pairs if ok]
                await self._map_in_threads(self._folder.write, complete, call.deadline, lane.jobs)
            num_written += len(complete)
        return SaveResult(sum(held) + num_written, num_written * self._folder.num_bytes)

    async def load(self, call: LoadCall) -> None:
        """Copy the longest prefix whose files exist and are undamaged."""
        progress = call.progress
        progress.pipe = "files"
        progress.source = self.name
        names = call.part.wanted
        step = self._lanes.lane_blocks
        started = time.perf_counter()
        starts = iter(range(0, len(names), step))
        running: deque[asyncio.Task[FetchResult | None]] = deque()
        # Not the call's event: pieces that have arrived still count when the rest is called off.
        enough = threading.Event()
        try:
            is_complete = True
            while is_complete:
                for start in itertools.islice(starts, _AHEAD - len(running)):
                    piece = names[start : start + step]
                    targets = call.block_ids[start : start + step]
                    running.append(asyncio.create_task(self._load_piece(piece, targets, call.deadline, enough)))
                if not running:
                    break
                result = await asyncio.shield(running[0])
                running.popleft()
                if result is None:
                    break
                progress.num_blocks += num_leading(result.valid)
                progress.num_bytes += result.num_bytes
                is_complete = progress.num_blocks % step == 0 and bool(result.valid.all())
        finally:
            progress.seconds += time.perf_counter() - started
            enough.set()
            for task in running:
                task.cancel()
            await settle(running)

    async def _load_piece(
        self, names: Sequence[BlockHash], targets: Sequence[BlockId], deadline: float, enough: threading.Event
    ) -> FetchResult | None:
        """Read files into a lane and copy the leading undamaged blocks into the pool; ``None``: there are none."""
        lanes = self._lanes
        async with self._lane(deadline) as lane:
            wanted = [(name, lanes.arena.blocks[slot]) for name, slot in zip(names, lane.slots, strict=False)]
            was_read = await self._map_in_threads(self._folder.read, wanted, deadline, lane.jobs)
            count = was_read.index(False) if False in was_read else len(was_read)
            if not count:
                return None
            return await lanes.deliver(lane.slots[:count], targets[:count], deadline=deadline, cancelled=enough)

    async def close(self) -> None:
        """Wait for running reads and writes, but not for a file system that hangs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if running := [asyncio.wrap_future(job) for job in self._running]:
            await asyncio.wait(running, timeout=_CLOSE_S)
        if self._running:
            log.warning("%s does not answer: %d files are left open", self._folder.path, len(self._running))
        else:
            await asyncio.to_thread(self._lanes.close)

    @asynccontextmanager
    async def _lane(self, deadline: float) -> AsyncIterator[_Lane]:
        """Use a lane; it becomes free when its threads' jobs have ended, too."""
        lane = _Lane(await self._lanes.acquire_lane(deadline))
        loop = asyncio.get_running_loop()
        try:
            yield lane
        finally:
            if late := [job for job in lane.jobs if not job.done()]:
                self._release_later(lane, late, loop)
            else:
                self._lanes.release_lane(lane.slots)

    def _release_later(self, lane: _Lane, late: list[Future[Any]], loop: asyncio.AbstractEventLoop) -> None:
        left = len(late)

        def on_job_done() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._lanes.release_lane(lane.slots)

        for job in late:
            job.add_done_callback(lambda _: loop.call_soon_threadsafe(on_job_done))

    async def _map_in_threads(
        self, call: Callable[..., T], arguments: Sequence[tuple[Any, ...]], deadline: float, jobs: list[Future[Any]]
    ) -> list[T]:
        """Call a function with each of some arguments in the threads, and append the jobs to ``jobs``.

        Raises:
            DeadlineError: The calls take too long; running ones go on.
            BatonError: A call failed; all have ended.
        """
        step = max(1, -(-len(arguments) // self._num_threads))
        submitted: list[Future[list[T]]] = []
        try:
            for at in range(0, len(arguments), step):
                submitted.append(self._threads.submit(_call_each, call, arguments[at : at + step]))
        except RuntimeError as error:
            raise PipeClosedError("the files were closed") from error
        finally:
            jobs += submitted
            self._running.update(submitted)
            for job in submitted:
                job.add_done_callback(self._running.discard)
        waits = [asyncio.wrap_future(job) for job in submitted]
        for wait in waits:
            wait.add_done_callback(
                lambda wait: wait.cancelled() or wait.exception()
            )  # retrieved, also if no caller waits
        try:
            late = (await asyncio.wait(waits, timeout=max(0.0, deadline - time.monotonic())))[1] if waits else ()
        finally:
            for job in submitted:
                job.cancel()  # those that have not begun
        if late:
            raise DeadlineError("the file system is too slow")
        return [value for wait in waits for value in wait.result()]


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe in the place of a file is not waited for


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _make_private(folder: Path) -> None:
    """Make a folder of this user private; an earlier version let others read it."""
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        folder.chmod(0o700)
        log.warning("%s could be used by others than its owner: it is private now", folder)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return a folder's entries; empty if it does not exist or is not a folder."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _call_each(call: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
    return [call(*each) for each in arguments]
