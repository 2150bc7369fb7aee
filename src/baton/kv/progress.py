"""A counter in shared memory that one process raises and others, or other threads, wait for.

The layers of a running step, as they are computed: a reader that was told "block 7 is complete at 1234" waits for 1234
and copies, while the owner computes the next layer. Waiting is the kernel's futex on the mapping itself: no message, no
polling, and the owner's cost without a waiter is one system call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
from typing import Any

import numpy as np
import numpy.typing as npt

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_POLL_S = 0.0005


class Progress:
    """The counter.

    Args:
        word: uint64 [1], aligned to 8 bytes, in memory that all parties map; readers may map it read-only.
    """

    def __init__(self, word: npt.NDArray[np.uint64]) -> None:
        self._word = word
        # The kernel compares 32 bits: the low half, which changes with every step.
        self._address = int(word.__array_interface__["data"][0])
        number = _SYS_FUTEX.get(platform.machine())
        self._futex = None if number is None else _futex_call(number)

    @property
    def value(self) -> int:
        """The counter now."""
        return int(self._word[0])

    def advance(self, value: int) -> None:
        """Raise the counter and wake who waits; a value not above the present one changes nothing."""
        if value > int(self._word[0]):
            self._word[0] = value
            if self._futex is not None:
                self._futex(self._address, _FUTEX_WAKE, 2**31 - 1, None)

    def wait(self, value: int, timeout_s: float) -> int:
        """Block until the counter has reached ``value`` or the time is up; returns the counter."""
        deadline = time.monotonic() + timeout_s
        while (now := int(self._word[0])) < value:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if self._futex is None:
                time.sleep(min(left, _POLL_S))  # a machine whose number of the system call is not known here
                continue
            self._futex(self._address, _FUTEX_WAIT, now & 0xFFFFFFFF, left)
        return now


def _futex_call(number: int) -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    syscall = libc.syscall
    syscall.restype = ctypes.c_long

    class Timespec(ctypes.Structure):
        _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))

    def call(address: int, operation: int, value: int, timeout_s: float | None) -> None:
        limit = None
        if timeout_s is not None:
            seconds = int(timeout_s)
            limit = ctypes.byref(Timespec(seconds, int((timeout_s - seconds) * 1e9)))
        result = syscall(
            ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_int(operation), ctypes.c_uint32(value),
            limit, None, ctypes.c_uint32(0),
        )  # fmt: skip
        code = ctypes.get_errno()
        # Changed before the wait began, time-out, signal: the caller looks at the counter again in any case.
        if result < 0 and code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))

    return call
