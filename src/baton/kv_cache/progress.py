"""A counter in shared memory that one process raises and others, or other threads, wait for.

The layers of a running step, as they are computed: a reader that was told "block 7 is complete at 1234" waits for 1234
and copies, while the owner computes the next layer. Waiting is the kernel's futex on the mapping itself: no message, no
polling, and the owner's cost without a waiter is one system call. Who waits for a value is woken by the values up to
it that are congruent to it modulo 32, so as a rule once, and not for every layer.
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

_FUTEX_WAIT_BITSET, _FUTEX_WAKE_BITSET = 9, 10
_BITS = 32
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
        before = int(self._word[0])
        if value > before:
            self._word[0] = value
            if self._futex is not None:
                self._futex(self._address, _FUTEX_WAKE_BITSET, 2**31 - 1, None, _bits(before + 1, value))

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
            self._futex(self._address, _FUTEX_WAIT_BITSET, now & 0xFFFFFFFF, deadline, _bits(value, value))
        return now


def _bits(first: int, last: int) -> int:
    """The set of bits that stands for the values from the first to the last."""
    run = (1 << min(last - first + 1, _BITS)) - 1 << first % _BITS
    return (run | run >> _BITS) & 0xFFFFFFFF


def _futex_call(number: int) -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    syscall = libc.syscall
    syscall.restype = ctypes.c_long

    class Timespec(ctypes.Structure):
        _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))

    def call(address: int, operation: int, value: int, deadline: float | None, bits: int) -> int:
        limit = None
        if deadline is not None:  # that of ``time.monotonic``, the clock of this operation
            seconds = int(deadline)
            limit = ctypes.byref(Timespec(seconds, int((deadline - seconds) * 1e9)))
        result = syscall(
            ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_int(operation), ctypes.c_uint32(value),
            limit, None, ctypes.c_uint32(bits),
        )  # fmt: skip
        code = ctypes.get_errno()
        # Changed before the wait began, time-out, signal: the caller looks at the counter again in any case.
        if result < 0 and code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))
        return int(result)

    return call
