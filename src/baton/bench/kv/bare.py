"""What a plain socket does: the baseline that the TCP pipe is compared with.

The peers shake hands as pipes do; then the socket is used bare. A request is (offset u64, bytes u64); the answer is
those bytes of the source's memory, by ``sendall``, and the reader takes them with ``recv_into``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time

from baton.errors import BatonError, PipeClosedError
from baton.kv_transfer.protocol.connect import accept_stream, bind_tcp, close_listener, connect_tcp, join_address
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.handshake import HANDSHAKE_S, PURPOSE_MESSAGES, greet_as_client, greet_or_refuse
from baton.kv_transfer.protocol.sockets import Stream
from baton.kv_transfer.types import Bytes

log = logging.getLogger(__name__)
_REQUEST = struct.Struct("<QQ")
_PATIENCE_S = 60
"""Seconds that the kernel lets a bare call wait for the peer."""


class BareServer:
    """Sends ranges of a block of memory to whoever asks, a thread per connection.

    Args:
        memory: uint8 [bytes].
        host: Address to bind.
        token: Shared token.
    """

    def __init__(self, memory: Bytes, host: str, token: str | None) -> None:
        self._memory, self._token = memory, token
        self._socket = bind_tcp(host, 0, token)
        self._socket.listen()
        self.address = join_address(host, self._socket.getsockname()[1])
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._closed = False
        self._threads = [threading.Thread(target=self._accept, name="bench-bare-accept", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Stop, and wait for the threads."""
        close_listener(self._socket)
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()
        for thread in self._threads:
            thread.join(HANDSHAKE_S)

    def _accept(self) -> None:
        while True:
            try:
                stream = accept_stream(self._socket, Wait(), "bare reader")
            except PipeClosedError:
                return
            if greet_or_refuse(stream, self._token, Wait(time.monotonic() + HANDSHAKE_S)):
                with self._lock:
                    if self._closed:
                        stream.close()
                        return
                    self._streams.add(stream)
                thread = threading.Thread(target=self._serve, args=(stream,), name="bench-bare", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, stream: Stream) -> None:
        whole = self._memory.data
        try:
            while True:
                stream.wait_readable(Wait(), "waiting for a request")
                offset, size = _REQUEST.unpack(stream.recv_exact(_REQUEST.size, _soon(), "reading a request"))
                if offset + size > len(whole):
                    log.warning("a bare reader asked for what is not there")
                    return
                make_bare(stream).sendall(whole[offset : offset + size])
        except (BatonError, OSError) as error:
            log.debug("a bare reader left: %s", error)
        finally:
            stream.close()
            with self._lock:
                self._streams.discard(stream)


class BareReader:
    """One bare connection."""

    def __init__(self, address: str, token: str | None) -> None:
        wait = _soon()
        self._stream = connect_tcp(address, wait)
        try:
            greet_as_client(self._stream, token, wait, purpose=PURPOSE_MESSAGES, facts=None)
        except BaseException:
            self._stream.close()
            raise
        self._socket = make_bare(self._stream)

    def read(self, offset: int, view: memoryview) -> None:
        """Read ``len(view)`` bytes from an offset of the source's memory.

        Raises:
            PipeClosedError: The source is gone, or silent.
        """
        try:
            self._socket.sendall(_REQUEST.pack(offset, len(view)))
            at = 0
            while at < len(view):
                got = self._socket.recv_into(view[at:])
                if got == 0:
                    raise PipeClosedError("the bare socket's peer hung up")
                at += got
        except OSError as error:
            raise PipeClosedError(f"the bare socket failed: {os.strerror(error.errno or 0)}") from error

    def close(self) -> None:
        """Close."""
        self._stream.close()


def make_bare(stream: Stream) -> socket.socket:
    """Return a stream's socket with one long kernel time-out instead of the ticks of Baton's streams."""
    sock = stream.sock
    for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        with contextlib.suppress(OSError):  # closed by the peer: the next call will say so
            sock.setsockopt(socket.SOL_SOCKET, name, struct.pack("ll", _PATIENCE_S, 0))
    return sock


def _soon() -> Wait:
    return Wait(time.monotonic() + HANDSHAKE_S)
