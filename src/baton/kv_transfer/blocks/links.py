"""Connections to block servers: which kind of pipe reaches a source, and one open pipe per source and epoch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.errors import ConfigError, FingerprintMismatchError, PipeClosedError, QueueFullError
from baton.kv_transfer.pipes.base import PipeOptions, ReadPipe
from baton.kv_transfer.pipes.registry import load_kind
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.handshake import Facts
from baton.kv_transfer.types import BlockSource

log = logging.getLogger(__name__)
MAX_LINKS = 256
_Key = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class LinkOptions(PipeOptions):
    """How sources are reached.

    Attributes:
        idle_s: Seconds after which an unused connection is closed.
    """

    idle_s: float = 60.0


class PipeDialer:
    """Opens read pipes: the first kind in the order of preference that reaches the source.

    Raises:
        ConfigError: A kind cannot work here; says why.
    """

    def __init__(self, kinds: Sequence[str], options: PipeOptions) -> None:
        wanted = [kind for kind in kinds if kind != "memory" or options.memory is not None]
        self._kinds = {kind: load_kind(kind)(options) for kind in wanted}

    def close(self) -> None:
        """End what the pipes share; they are closed before."""
        for kind in self._kinds.values():
            kind.close()

    def connect(self, source: BlockSource, facts: Facts, wait: Wait) -> tuple[ReadPipe, str]:
        """Return a pipe, and why it is not of a kind preferred over it (empty: it is the first choice).

        Raises:
            PipeClosedError: No kind reaches the source.
            BatonError: The source was reached and refused; then no other kind is tried.
        """
        addresses = {endpoint.kind: endpoint.address for endpoint in source.endpoints}
        reasons: list[str] = []
        for name, kind in self._kinds.items():
            if name not in addresses:
                if name != "memory":
                    reasons.append(f"{name}: not offered")
                continue
            try:
                pipe = kind.connect(addresses[name], facts, wait)
            except (PipeClosedError, ConfigError) as error:  # not there, or a pipe that cannot work on this machine
                reasons.append(f"{name}: {error}")
                continue
            if reasons:
                log.warning("%s is reached over %s (%s)", source.instance_id, name, "; ".join(reasons))
            return pipe, "; ".join(reasons)
        raise PipeClosedError(f"no pipe reaches {source.instance_id}: {'; '.join(reasons) or 'no kind in common'}")


@dataclass(eq=False, slots=True)
class PeerConnection:
    """An open pipe to a source. ``users`` counts reads under way."""

    key: _Key
    pipe: ReadPipe
    facts: Facts
    fallback_reason: str
    users: int = 0
    last_used: float = field(default_factory=time.monotonic)


class LinkCache:
    """Keeps one link per source and epoch; closes those unused for ``idle_s`` seconds."""

    def __init__(self, dialer: PipeDialer, *, idle_s: float) -> None:
        self._dialer, self._idle_s = dialer, idle_s
        self._changed = threading.Condition()
        self._links: dict[_Key, PeerConnection] = {}
        self._connecting: set[_Key] = set()
        self._closed = False
        self._reaper: threading.Thread | None = None

    def take(self, source: BlockSource, facts: Facts, wait: Wait) -> tuple[PeerConnection, bool]:
        """Return a link for one read, and whether it was made for it; :meth:`give` it back.

        Raises:
            PipeClosedError: Nothing reaches the source.
            QueueFullError: ``MAX_LINKS`` sources are being read from right now.
            FingerprintMismatchError, StaleBlockError, UnauthenticatedError: The source refused.
            DeadlineError, CancelledError: As their names say.
        """
        key = (source.instance_id, bytes(source.epoch))
        with self._changed:
            while True:
                if self._closed:
                    raise PipeClosedError("the fetcher was closed")
                link = self._links.get(key)
                if link is not None and link.pipe.alive():
                    return self._use(link, facts), False
                if link is not None:
                    self._forget(link)
                if key not in self._connecting:
                    break
                wait.check(f"connecting to {source.instance_id}")
                self._changed.wait(wait.nap())
            self._make_room()
            self._connecting.add(key)
        return self._connect(key, source, facts, wait), True

    def give(self, link: PeerConnection) -> None:
        """End a read."""
        with self._changed:
            link.users -= 1
            link.last_used = time.monotonic()

    def drop(self, link: PeerConnection) -> None:
        """Close a link that failed."""
        with self._changed:
            self._forget(link)

    def close(self) -> None:
        """Close all links; reads under way fail."""
        with self._changed:
            self._closed = True
            for link in list(self._links.values()):
                self._forget(link)
            self._changed.notify_all()
            reaper = self._reaper
        if reaper is not None:
            reaper.join()
        self._dialer.close()

    def __len__(self) -> int:
        return len(self._links)

    def _use(self, link: PeerConnection, facts: Facts) -> PeerConnection:
        if link.facts != facts:
            # The ids were checked against what the caller says of the source, which is not what the source said.
            raise FingerprintMismatchError("the source was described otherwise before", field="num_blocks")
        link.users += 1
        return link

    def _connect(self, key: _Key, source: BlockSource, facts: Facts, wait: Wait) -> PeerConnection:
        pipe: ReadPipe | None = None
        try:
            pipe, reason = self._dialer.connect(source, facts, wait)
        finally:
            with self._changed:
                self._connecting.discard(key)
                closed = self._closed
                if pipe is not None and not closed:
                    for old in [other for other in self._links.values() if other.key[0] == key[0] and not other.users]:
                        self._forget(old)  # an epoch that is over
                    link = self._links[key] = PeerConnection(key, pipe, facts, reason, users=1)
                    self._start_reaper()
                self._changed.notify_all()
        if closed:
            pipe.close()
            raise PipeClosedError("the fetcher was closed")
        return link

    def _make_room(self) -> None:
        if len(self._links) + len(self._connecting) < MAX_LINKS:
            return
        unused = [link for link in self._links.values() if not link.users]
        if not unused:
            raise QueueFullError(f"{MAX_LINKS} sources are being read from", retry_after_s=1.0)
        self._forget(min(unused, key=lambda link: link.last_used))

    def _forget(self, link: PeerConnection) -> None:
        if self._links.get(link.key) is link:
            del self._links[link.key]
        link.pipe.close()

    def _start_reaper(self) -> None:
        if self._reaper is None:
            self._reaper = threading.Thread(target=self._reap, name="baton-fetch-idle", daemon=True)
            self._reaper.start()

    def _reap(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for link in [link for link in self._links.values() if not link.users]:
                    if now - link.last_used >= self._idle_s:
                        self._forget(link)
                ends = [link.last_used + self._idle_s - now for link in self._links.values() if not link.users]
                # Links in use are looked at again later: to wake this thread with every read would cost more than that.
                self._changed.wait(min(ends, default=self._idle_s))
