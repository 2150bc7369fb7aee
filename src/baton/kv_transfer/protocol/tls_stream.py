"""A stream whose bytes are encrypted on their way; both ends show a certificate of one authority.

TLS in user space: the bytes go through this process once more, and no batch of spans can be handed to the kernel, so
it carries about a quarter of what plain TCP does.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence

from baton.errors import PipeClosedError, UnauthenticatedError
from baton.kv_transfer.protocol.deadline import TICK_S, Wait
from baton.kv_transfer.protocol.sockets import BATCH_BYTES, Buffer, Stream, as_bytes
from baton.rpc.tls import Tls


class TlsStream(Stream):
    """A TLS connection. Unlike a plain stream it is used by one thread at a time; ``close`` may come from any.

    Args:
        sock: Connected; owned from now on.
        context: Says which certificate is shown and which are believed.
        peer: The peer's name, for messages.
        server_name: What the peer's certificate must stand for; ``None``: this side is the server.
        wait: For the handshake.

    Raises:
        UnauthenticatedError: The peer's certificate does not hold, or it refused this side's.
        PipeClosedError: The peer does not speak TLS, or is gone.
        DeadlineError, CancelledError: As their names say.
    """

    encrypted = True

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, peer: str, server_name: str | None, wait: Wait
    ) -> None:
        try:
            self._tls = context.wrap_socket(
                sock, server_side=server_name is None, server_hostname=server_name, do_handshake_on_connect=False
            )
        except (OSError, ValueError) as error:
            sock.close()
            raise PipeClosedError(f"no TLS with {peer}: {error}") from error
        super().__init__(self._tls, peer=peer)
        self._tls.setblocking(False)
        try:
            self._do(self._tls.do_handshake, wait, "shaking hands over TLS")
        except BaseException:
            self.close()
            raise

    def wait_readable(self, wait: Wait, what: str) -> None:
        """Block until bytes (or the peer's end) are there."""
        if not self._tls.pending():
            super().wait_readable(wait, what)

    def readable_within(self, seconds: float) -> bool:
        """Whether bytes (or the peer's end) are there, or come within this time."""
        return bool(self._tls.pending()) or super().readable_within(seconds)

    def peer_gone(self) -> bool:
        """Whether the peer has hung up or the stream was closed; never blocks."""
        return not self._tls.pending() and self.hung_up()

    def recv_into(self, views: Sequence[memoryview], wait: Wait, what: str) -> None:
        """Fill byte buffers one after the other; see :meth:`Stream.recv_into`."""
        for view in map(as_bytes, views):
            at = 0
            while at < len(view):
                part = view[at : at + BATCH_BYTES]
                got = self._do(lambda part=part: self._tls.recv_into(part), wait, what)  # type: ignore[misc]
                if not got:
                    raise self.gone(what)
                at += got

    def send_all(self, buffers: Sequence[Buffer], wait: Wait, what: str, *, stall_s: float | None = None) -> None:
        """Send byte buffers one after the other; see :meth:`Stream.send_all`."""
        for view in map(as_bytes, buffers):
            at = 0
            while at < len(view):
                part = view[at : at + BATCH_BYTES]
                at += self._do(lambda part=part: self._tls.send(part), wait, what)  # type: ignore[misc]
                if stall_s is not None:
                    wait = Wait(time.monotonic() + stall_s, wait.cancelled)

    def _do(self, call: Callable[[], int | None], wait: Wait, what: str) -> int:
        """Do something as soon as the connection lets it."""
        while True:
            try:
                with self.in_use():
                    return call() or 0
            except ssl.SSLWantReadError:
                self._await(select.POLLIN, wait, what)
            except ssl.SSLWantWriteError:
                self._await(select.POLLOUT, wait, what)
            except ssl.SSLEOFError as error:
                raise self.gone(what) from error
            except ssl.SSLError as error:
                if isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in (error.reason or ""):
                    reason = getattr(error, "verify_message", "") or error.reason
                    raise UnauthenticatedError(f"{self.peer}: certificates don't hold, {what}: {reason}") from error
                raise self.gone(what, OSError(0, f"TLS: {error.reason or error}")) from error
            except OSError as error:
                raise self.gone(what, error) from error

    def _await(self, event: int, wait: Wait, what: str) -> None:
        wait.check(what)
        with self.in_use():
            poller = select.poll()
            poller.register(self._tls, event)
            nap = wait.nap()
            poller.poll(math.ceil(1000 * (TICK_S if nap is None else min(nap, TICK_S))))


def tls_to(stream: Stream, tls: Tls, host: str, wait: Wait) -> TlsStream:
    """Make a new connection to a server an encrypted one; errors are those of :class:`TlsStream`."""
    context = tls.pipe_context(server_side=False)
    return TlsStream(stream.detach(), context, peer=stream.peer, server_name=tls.name or host, wait=wait)


def tls_from(stream: Stream, tls: Tls, wait: Wait) -> TlsStream:
    """Make a connection that a client made an encrypted one; errors are those of :class:`TlsStream`."""
    context = tls.pipe_context(server_side=True)
    return TlsStream(stream.detach(), context, peer=stream.peer, server_name=None, wait=wait)
