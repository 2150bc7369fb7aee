"""One NIXL agent: registered memory, peers, and one-sided reads that end before their caller goes on.

NIXL moves the bytes with UCX: InfiniBand, NVLink, shared memory, process to process (CMA), sockets. It runs no thread
of its own here, because its progress thread burns a core while nothing happens: a reader polls until its read is done,
and its source must call :meth:`NixlAgent.progress` meanwhile, which the peers tell each other over a connection of
theirs. Calls are taken one at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.config.environment import set_nixl_log_level, set_ucx_environment
from baton.errors import ConfigError, DeadlineError, PipeClosedError
from baton.kv_cache.arena import Arena, MemoryRange, SharedDeviceArena
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.types import Bytes
from baton.kv_transfer.wire import BadFrameError

log = logging.getLogger(__name__)
Rows = npt.NDArray[np.uint64]
"""uint64 [n, 3]: address, bytes, index of the device (0 in host memory)."""

MAX_PEERS = 256
"""Peers known at once, as far as they are not in use."""
DRAIN_S = 2.0
"""How long an abandoned read may take to end before it counts as stuck."""
MAX_METADATA_BYTES = 64 << 10
"""Bound on what a peer says about its memory; a machine with eight network cards needs a few KiB."""
MAX_NAME = 64
_MODULES = ("nixl", "nixl_cu13", "nixl_cu12")
_BACKEND = "UCX"
_SPINS = 200
_SLOWEST_BYTES_PER_S = 32 << 20
"""Speed of the slowest network that a read has time for before its silence counts."""
_PAUSE_S = (20e-6, 500e-6)
"""Shortest and longest pause between two looks at a read under way, after the first ``_SPINS`` looks without any."""

_TRYING = threading.Lock()
_REFUSED_DEVICES: dict[int, str] = {}
"""By the index of a GPU: why NIXL does not take its memory, or empty."""
_PROGRESS_PAUSE_S = 1e-3
"""Pause between two looks at what a peer's read needs, where it needs anything. Looking oftener was measured to slow
reads down between processes (they need nothing but the processor), and not to speed them up over sockets."""


@dataclass(eq=False, slots=True)
class Region:
    """Memory that an agent has registered.

    Attributes:
        memories: uint8 [bytes] each, or arenas in device memory; kept alive.
        kind: What NIXL calls the memory (:func:`segment_type`), one for all.
        metadata: What a peer's agent needs to read it, and nothing about other regions.
        stuck: Reads into it that could not be brought to an end; it must not be used again.
    """

    memories: tuple[Bytes | SharedDeviceArena, ...]
    kind: str
    metadata: bytes
    descriptors: Any
    stuck: list[Any] = field(default_factory=list)


class NixlAgent:
    """An agent with the UCX backend; thread safe. One per service is enough, and costs about half a second to make.

    Args:
        host: Address of this machine that peers reach it by; UCX listens on its interface alone.

    Attributes:
        name: Unique in the world.
        refused: Whether NIXL has refused a peer's metadata. It keeps half of them, for as long as the agent lives: that
            peer can only be met by another agent.

    Raises:
        ConfigError: NIXL is not installed or UCX does not come up; says which, and what to do.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        set_ucx_environment(host)
        api = _import_nixl()
        self.name = f"baton-{secrets.token_hex(8)}"
        self.refused = False
        self._errors = error_types(api)
        self._lock = threading.Lock()
        self._peers: dict[str, int] = {}
        self._failed: set[str] = set()
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent: Any = api.nixl_agent(self.name, config)
            # Peers may die: their end must be an error, not a read that never ends.
            self._agent.create_backend(_BACKEND, {"ucx_error_handling_mode": "peer"})
        except self._errors as error:
            raise ConfigError(
                f"the nixl pipe cannot work here: NIXL's UCX does not start ({error})", field="pipes"
            ) from error

    @property
    def closed(self) -> bool:
        """Whether the agent was closed, or given up because a read into an arena was stuck."""
        return self._agent is None

    def register(self, *memories: Bytes | SharedDeviceArena) -> Region:
        """Register memory, to be read from or into.

        Args:
            memories: uint8 [bytes], C-contiguous, or arenas in device memory; all of one kind.

        Raises:
            PipeClosedError: The agent was closed.
            ConfigError: The memory cannot be registered (a limit on locked memory, say, or NIXL's UCX was built without
                CUDA).
        """
        ranges = [range_of(memory) for memory in memories]
        kind = segment_type(ranges[0])
        if any(segment_type(each) != kind for each in ranges):
            raise ConfigError("memory of the host and of a device cannot be registered as one", field="pipes")
        with self._lock:
            agent = self._get()
            try:
                rows = [(each.address, each.size, each.device or 0, "") for each in ranges]
                descriptors = agent.register_memory(rows, kind, backends=[_BACKEND])
                metadata = bytes(agent.get_partial_agent_metadata(descriptors, True, [_BACKEND]))
            except self._errors as error:
                what = " and ".join(map(str, ranges[:2])) + (" and more" if len(ranges) > 2 else "")
                raise ConfigError(f"NIXL cannot register {what}: {error}", field="pipes") from error
        return Region(memories, kind, metadata, descriptors)

    def connect(self, name: str, metadata: bytes) -> None:
        """Get to know a peer's agent and a region of it; :meth:`disconnect` once per call.

        Args:
            name: Name of the peer's agent.
            metadata: Whole and undamaged (:func:`parse_agent`): NIXL does not check.

        Raises:
            BadFrameError: The metadata is not that of this agent, or NIXL has :attr:`refused` it.
            PipeClosedError: This agent was closed.
        """
        if name == self.name:
            raise BadFrameError("both ends of the pipe use the same NIXL agent", field="agent")
        with self._lock:
            agent = self._get()
            try:
                found = agent.add_remote_agent(metadata)
            except self._errors as error:
                self.refused = True
                raise BadFrameError(f"NIXL refuses the peer's metadata: {error}", field="metadata") from error
            found = found.decode(errors="replace") if isinstance(found, bytes) else found
            if found != name:
                if found not in self._peers:
                    agent.remove_remote_agent(found)
                else:  # what is known of that one may be wrong now
                    self._failed.add(found)
                raise BadFrameError("the peer's NIXL metadata is another agent's", field="agent")
            self._peers[name] = self._peers.pop(name, 0) + 1  # the latest comes last
            idle = [peer for peer, uses in self._peers.items() if uses == 0]
            for peer in idle[: max(0, len(self._peers) - MAX_PEERS)]:
                self._forget(peer)

    def disconnect(self, name: str) -> None:
        """End one use of a peer.

        It stays known, as UCX's sockets lose a file descriptor for good with every peer that is forgotten and met
        again; unless a read from it failed.
        """
        with self._lock:
            if name not in self._peers:
                return
            self._peers[name] -= 1
            if self._peers[name] == 0 and name in self._failed:
                self._forget(name)

    def progress(self) -> None:
        """Let UCX do what peers wait for; never blocks.

        Raises:
            PipeClosedError: The agent was closed.
        """
        with self._lock:
            self._get().get_new_notifs([_BACKEND])  # notifications: Baton's pipes say everything over their lines

    def read(
        self, peer: str, rows: tuple[Rows, Rows], target: Region, line: Stream, wait: Wait, *, source: str = "DRAM"
    ) -> None:
        """Copy a peer's memory; on return or error nothing writes into the target any more, unless it says ``stuck``.

        Args:
            peer: Name of its agent.
            rows: Where to, and where from; as many of each, of equal lengths.
            target: The region that the first rows are in.
            line: A connection to the peer; its end ends the read.
            wait: Deadline and cancel flag.
            source: NIXL's description of the peer's memory.

        Raises:
            PipeClosedError: The peer or this agent is gone, or the peer does not own that memory.
            DeadlineError, CancelledError: As their names say.
        """
        wait.check("reading a peer's memory")
        handle, state = self._start(peer, rows, (target.kind, source))
        try:
            self._await(handle, state, line, wait, patience_s=float(rows[0][:, 1].sum()) / _SLOWEST_BYTES_PER_S)
        except BaseException as error:
            if isinstance(error, PipeClosedError):
                self._failed.add(peer)
            # UCX cannot call a read off: it is over when it is over, or when the whole agent is.
            if not self._drained(handle):
                target.stuck.append(handle)
                raise
            self._release(handle)
            raise
        self._release(handle)

    def close(self) -> None:
        """End the agent with all it has under way; harmless if repeated."""
        with self._lock:
            agent = self._agent
            self._agent = None
            for name in list(self._peers):
                self._try(lambda name=name: agent.remove_remote_agent(name))
            self._peers.clear()

    def _start(self, peer: str, rows: tuple[Rows, Rows], kinds: tuple[str, str]) -> tuple[Any, str]:
        with self._lock:
            agent = self._get()
            try:
                local, remote = (agent.get_xfer_descs(part, kind) for part, kind in zip(rows, kinds, strict=True))
                handle = agent.initialize_xfer("READ", local, remote, peer, b"", [_BACKEND])
                return handle, agent.transfer(handle)
            except self._errors as error:
                self._failed.add(peer)
                raise PipeClosedError(f"{peer} cannot be read from: {error}") from error

    def _await(self, handle: Any, state: str, line: Stream, wait: Wait, patience_s: float) -> None:
        looks = 0
        patient_until = time.monotonic() + patience_s  # NIXL does not tell how far a read has come
        while state == "PROC":
            looks += 1
            if looks > _SPINS:
                time.sleep(min(_PAUSE_S[1], _PAUSE_S[0] * (looks / _SPINS)))
                if time.monotonic() < patient_until:
                    wait.record_progress()
                wait.check("reading a peer's memory")
                if line.peer_gone():
                    raise PipeClosedError(f"{line.peer} went away during a read")
            state = self._state(handle)
        if state != "DONE":
            raise PipeClosedError(f"a read from {line.peer} failed: the peer is gone, or not its owner any more")

    def _state(self, handle: Any) -> str:
        with self._lock:
            try:
                return str(self._get().check_xfer_state(handle))
            except self._errors as error:
                log.debug("a NIXL read failed: %s", error)
                return "ERR"

    def _drained(self, handle: Any) -> bool:
        wait = Wait(time.monotonic() + DRAIN_S)
        try:
            while self._state(handle) == "PROC":
                time.sleep(_PAUSE_S[1])
                wait.check("ending a read")
        except DeadlineError:
            return False
        except PipeClosedError:  # the agent is gone, and the read with it
            return True
        return True

    def _release(self, handle: Any) -> None:
        with self._lock:
            self._try(handle.release)

    def _forget(self, name: str) -> None:
        del self._peers[name]
        self._failed.discard(name)
        if self._agent is not None:
            self._try(lambda: self._agent.remove_remote_agent(name))
            self._try(lambda: self._agent.get_new_notifs([_BACKEND]))  # lets UCX close its connections

    def _try(self, call: Any) -> None:
        """Give something back; what a dead peer keeps NIXL from taking, it takes when the agent ends."""
        try:
            call()
        except self._errors as error:
            log.debug("NIXL gave something back late: %s", error)

    def _get(self) -> Any:
        if self._agent is None:
            raise PipeClosedError("the NIXL agent was closed")
        return self._agent


def nixl_obstacle() -> str:
    """Say why NIXL cannot be used in this process; empty: it is installed."""
    try:
        _import_nixl()
    except ConfigError as error:
        return error.message
    return ""


def progress_until_readable(agent: NixlAgent, line: Stream, wait: Wait, what: str) -> None:
    """Serve a peer's reads until the line has something to say (or ends).

    Raises:
        DeadlineError, CancelledError, PipeClosedError: As their names say.
    """
    agent.progress()
    while not line.readable_within(_PROGRESS_PAUSE_S):
        agent.progress()
        wait.check(what)


def describe_agent(name: str, metadata: bytes) -> dict[str, Any]:
    """Return the JSON-ready fields that tell a peer of an agent: its name, NIXL's metadata, and a digest of both.

    NIXL does not check what it loads. Of metadata that was cut short it keeps half, so that the whole of it is refused
    afterwards, or it takes the process down; so nothing gets there whose digest is not right.

    Args:
        name: The agent's.
        metadata: Of the region that the peer may read.
    """
    return {"agent": name, "metadata": metadata.hex(), "digest": _digest(name, metadata)}


def parse_agent(fields: Mapping[str, Any]) -> tuple[str, bytes]:
    """Read what a peer said of its agent: its name and metadata.

    Raises:
        BadFrameError: A field is missing, malformed or too long, or this is not what the peer made a digest of.
    """
    name = fields.get("agent")
    text = fields.get("metadata")
    digest = fields.get("digest")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isascii():
        raise BadFrameError("the peer's agent name is malformed", field="agent")
    if not isinstance(text, str) or not 0 < len(text) <= 2 * MAX_METADATA_BYTES:
        raise BadFrameError("the peer's NIXL metadata is missing or too long", field="metadata")
    try:
        metadata = bytes.fromhex(text)
    except ValueError as error:
        raise BadFrameError("the peer's NIXL metadata is malformed", field="metadata") from error
    if digest != _digest(name, metadata):
        raise BadFrameError("the peer's NIXL metadata is not what it made a digest of", field="metadata")
    return name, metadata


def _digest(name: str, metadata: bytes) -> str:
    return hashlib.sha256(b"%d %s %s" % (len(name), name.encode(), metadata)).hexdigest()


def _import_nixl() -> ModuleType:
    set_nixl_log_level()
    reasons = []
    for name in _MODULES:
        try:
            with _own_logging():
                return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    why = "; ".join(reasons) or "it is not installed"
    raise ConfigError(
        f"the nixl pipe needs NIXL ({why}): pip install 'baton-serve[nixl]', which works without CUDA too",
        field="pipes",
    )


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """Keep NIXL from changing the process's logging, and from writing to standard output."""
    raising = logging.raiseExceptions
    try:
        yield
    finally:
        logging.raiseExceptions = raising
        theirs = logging.getLogger("nixl")
        theirs.handlers.clear()
        theirs.propagate = True
        theirs.setLevel(logging.WARNING)


def device_obstacle(arena: Arena) -> str:
    """Say why NIXL cannot serve an arena in device memory from here, or read into it; empty: it can.

    A GPU's memory is tried, with an agent of its own, once per device and process: whether UCX was built with CUDA only
    a registration tells. That it cannot be registered is said in the log.
    """
    if not isinstance(arena, SharedDeviceArena):
        return "the nixl pipe serves host memory only, or device memory that has addresses, and these blocks have none"
    device = arena.memory_range().device
    if device is None:  # memory of the host stands in for a device's
        return ""
    with _TRYING:
        if device not in _REFUSED_DEVICES:
            _REFUSED_DEVICES[device] = _try_device(arena)
            if _REFUSED_DEVICES[device]:
                log.warning("%s", _REFUSED_DEVICES[device])
        return _REFUSED_DEVICES[device]


def _try_device(arena: SharedDeviceArena) -> str:
    where = arena.memory_range()
    try:
        agent = NixlAgent()
    except ConfigError as error:
        return error.message
    try:
        agent.register(arena)
    except ConfigError as error:
        name = f"cuda:{where.device}"
        return f"the nixl pipe takes no blocks in the memory of {name} ({error.message}): it needs NIXL with CUDA"
    finally:
        agent.close()
    return ""


def range_of(memory: Bytes | SharedDeviceArena) -> MemoryRange:
    """Return where memory lies."""
    if isinstance(memory, SharedDeviceArena):
        return memory.memory_range()
    return MemoryRange(int(memory.ctypes.data), memory.nbytes)


def segment_type(where: MemoryRange) -> str:
    """Return what NIXL calls the kind of memory: that of the host, or of a GPU."""
    return "DRAM" if where.device is None else "VRAM"


def error_types(api: ModuleType) -> tuple[type[Exception], ...]:
    """Return what NIXL's calls raise."""
    bindings = api.nixlBind
    found = [getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
    return (RuntimeError, *(item for item in found if isinstance(item, type) and issubclass(item, Exception)))
