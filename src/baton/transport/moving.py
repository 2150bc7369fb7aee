"""Moves spans of memory over stream sockets in C: thousands of blocks cost Python one call."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from baton.native import address_of, load_helper
from baton.transport.read_wire import Spans
from baton.transport.sockets import BATCH_BYTES, Stream
from baton.transport.waiting import Wait


class SpanMover:
    """Sends and fills spans of memory; thread safe."""

    def __init__(self, function: Any) -> None:
        self._move = function

    @classmethod
    def load(cls) -> SpanMover | None:
        """Return one, or ``None`` where there is no compiler."""
        library = load_helper(Path(__file__).with_name("moving.c"))
        if library is None:
            return None
        function, pointer = library.baton_move_spans, ctypes.c_void_p
        function.argtypes = [
            *(ctypes.c_int, ctypes.c_int, pointer, ctypes.c_size_t, pointer, ctypes.c_uint64, pointer),
        ]
        function.restype = ctypes.c_int64
        return cls(function)

    def send(self, stream: Stream, spans: Spans, wait: Wait, what: str, *, stall_s: float) -> None:
        """Send spans one after the other; see :meth:`Stream.send_all`."""
        self._run(stream, spans, wait, what, stall_s)

    def recv(self, stream: Stream, spans: Spans, wait: Wait, what: str) -> None:
        """Fill spans one after the other; see :meth:`Stream.recv_into`."""
        self._run(stream, spans, wait, what, None)

    def _run(self, stream: Stream, spans: Spans, wait: Wait, what: str, stall_s: float | None) -> None:
        state, code = np.zeros(2, np.uint64), ctypes.c_int()
        places = (address_of(spans), len(spans), address_of(state), BATCH_BYTES, ctypes.addressof(code))
        with stream.in_use():
            fd = stream.sock.fileno()
            while int(state[0]) < len(spans):
                moved = self._move(fd, stall_s is not None, *places)
                if code.value == errno.EPIPE:
                    raise stream.gone(what)
                if code.value not in (0, errno.EAGAIN):
                    raise stream.gone(what, OSError(code.value, os.strerror(code.value)))
                if stall_s is not None and moved:
                    wait = Wait(time.monotonic() + stall_s, wait.cancelled)
                elif int(state[0]) < len(spans):
                    wait.check(what)
