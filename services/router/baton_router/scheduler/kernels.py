"""The passes over all instances that a decision takes, in C (``native/placement.c``).

A decision among 16 + 16 instances would spend most of its time in a hundred calls of numpy, each on a few numbers. What
the numbers mean stands where these are called from: :mod:`~baton_router.scheduler.policies.match_minus_load`,
:mod:`~baton_router.scheduler.policies.cost_ms` and :func:`~baton_router.scheduler.policy.choose`.

Arguments are packed as the C structures lie in memory: 8 bytes each, pointers as addresses. Whoever packs an address
keeps the array until the call is over.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from baton.native import function

_POINTER = ctypes.c_void_p
_DATA = ctypes.c_char_p
_INT = ctypes.c_int64
_DOUBLE = ctypes.c_double
_LINES = "3q3d"
_MATCH = struct.Struct(f"=4q{3 * _LINES}3d2qq")
_COST = struct.Struct(f"=5q{4 * _LINES}q8dq")
_PAIRS = struct.Struct(f"=6q{_LINES}2d")
_OPTIONS = struct.Struct("=6q")

# With the interpreter's lock held: each takes a few microseconds.
_gather_side = function(
    "gather_side", None, _POINTER, _POINTER, _POINTER, _INT, _DOUBLE, _DOUBLE, _DOUBLE, _POINTER, keep_lock=True
)
_free_rows = function("free_rows", _INT, _POINTER, _INT, _DOUBLE, _DATA, keep_lock=True)
_score_match = function("score_match", ctypes.c_int, _DATA, keep_lock=True)
_score_cost = function("score_cost", None, _DATA, keep_lock=True)
_choose = function("choose", _INT, _DATA, _DATA, _DOUBLE, _DOUBLE, _DATA, keep_lock=True)
_prefill_order = function("prefill_order", _INT, _DATA, _DATA, _INT, _INT, _INT, _POINTER, keep_lock=True)
_CHOICE = struct.Struct("=2qd")

PackedLines = tuple[int, int, int, float, float, float]
"""As :meth:`baton_router.scheduler.speeds.Lines.packed` returns it."""
NO_LINES: PackedLines = (0, 0, 0, 0.0, 0.0, 0.0)


def gather_side(
    loads: int, held: int, at: int, count: int, tokens: float, now: float, recent_s: float, out: int
) -> None:
    """Put one role's instances side by side, see :class:`~baton_router.scheduler.policy.Side`.

    Args:
        loads: Address of the rows of :class:`~baton_router.registry.load.LoadColumns`.
        held: Address of the leading tokens that each of these holds, float64.
        at: Address of the positions to take, int64; 0: the first ``count``.
        count: How many.
        tokens: Of the prompt, at least 1.
        now: By the clock of the loads, in seconds.
        recent_s: After so many seconds work that was done counts 1/e as much.
        out: Address of ``[6, count]`` float64.
    """
    _gather_side(loads, held, at, count, tokens, now, recent_s, out)


def free_rows(loads: int, count: int, sequences: int) -> bytes:
    """Return the positions of instances with room for so many sequences, see ``LoadTracker.has_room``.

    Args:
        loads: Address of the rows of :class:`~baton_router.registry.load.LoadColumns`.
        count: How many.
        sequences: Of the request.

    Returns:
        int64 each.
    """
    out = bytes(8 * count)  # not shared yet: filled in place
    found: int = _free_rows(loads, count, sequences, out)
    return out if found == count else out[: 8 * found]


def score_match(
    sides: tuple[int, int, int, int],
    lines: tuple[PackedLines, PackedLines, PackedLines],
    numbers: tuple[float, float, float],
    local: tuple[bool, bool],
    out: int,
) -> bool:
    """Score both sides for ``match_minus_load``.

    Args:
        sides: Addresses of both blocks, and how many instances each has.
        lines: Of computing a prompt, of decoding, of computing a prompt on decode instances.
        numbers: Prompt tokens, at least 1; beta; the decode side's cost.
        local: Whether to score the prefill on decode instances, and whether its speed is known.
        out: Address of ``[4, prefills]``, ``[2, decodes]`` and ``[3, decodes]`` float64, one after the other.

    Returns:
        Whether the prefill on decode instances was scored.
    """
    return bool(_score_match(_MATCH.pack(*sides, *lines[0], *lines[1], *lines[2], *numbers, *local, out)))


def score_cost(
    sides: tuple[int, int, int, int, int],
    lines: tuple[PackedLines, PackedLines, PackedLines, PackedLines],
    least: tuple[int, float, float],
    numbers: tuple[float, float, float, float, float, float],
    out: int,
) -> None:
    """Score both sides for ``cost_ms``.

    Args:
        sides: Addresses of both blocks and of what decode instances can load, 0: no more than they hold; and how many
            instances each side has.
        lines: Of computing a prompt, of decoding, of computing a prompt on decode instances, of loading.
        least: Address of each decode instance's least base and slope of transfers; those of its like.
        numbers: Prompt tokens, sequences, tokens that will be generated, bytes per token, the prefill side's cost, the
            threshold; -1: none.
        out: Address of ``[6, prefills]``, ``[7, decodes]`` and, where decode instances can load, ``[5, decodes]``
            float64, one after the other.
    """
    _score_cost(_COST.pack(*sides, *lines[0], *lines[1], *lines[2], *lines[3], *least, *numbers, out))


def pack_pairs(
    sides: tuple[int, int, int, int, int], rows: int, moving: PackedLines, kv_bytes: float, threshold: float
) -> bytes:
    """Return what :func:`choose` and :func:`prefill_order` need to know of pairs.

    Args:
        sides: Addresses of missing tokens, base and slope per prefill instance, of missing tokens and the highest score
            per decode instance.
        rows: Address of the transfers' rows, one per decode instance.
        moving: Columns of these, and what stands in for them.
        kv_bytes: Of a token.
        threshold: Missing tokens below which there is no pair; -1: none.
    """
    return _PAIRS.pack(*sides, rows, *moving, kv_bytes, threshold)


def pack_options(prefill: int, decode: int, local: int, store: int, sizes: tuple[int, int]) -> bytes:
    """Return what can be chosen.

    Args:
        prefill: Address of the prefill instances' totals.
        decode: Address of the decode instances'.
        local: Address of those of the prefill on each decode instance; 0: it is no candidate.
        store: Address of those of loading from the store; 0: it is no candidate.
        sizes: How many prefill and decode instances there are.
    """
    return _OPTIONS.pack(prefill, decode, local, store, *sizes)


def choose(options: bytes, pairs: bytes | None, draws: Sequence[float]) -> tuple[int, int, int, float]:
    """Choose the best option; equal ones by draw.

    Args:
        options: What can be chosen.
        pairs: What speaks for pairs; ``None``: nothing.
        draws: Two numbers from 0 to 1; -1: not drawn.

    Returns:
        The draw to make and to come again with, from 1 on, 0: none; the decode instance; its option: a prefill
        instance, or one of those after these; the score.

    Raises:
        ValueError: A score is not a number.
    """
    found = ctypes.create_string_buffer(_CHOICE.size)
    need = _choose(options, pairs, *draws, found)
    if need < 0:
        raise ValueError("a policy's score is not a number")
    return (need, *_CHOICE.unpack_from(found))


def prefill_order(options: bytes, pairs: bytes | None, decode: int, first: int, limit: int) -> list[int]:
    """Return the best prefill instances for a decode instance.

    Args:
        options: What can be chosen.
        pairs: What speaks for pairs; ``None``: nothing.
        decode: The decode instance.
        first: From which one on equal ones come in their order.
        limit: How many at most.
    """
    out = (ctypes.c_int64 * limit)()
    found: int = _prefill_order(options, pairs, decode, first, limit, ctypes.addressof(out))
    return out[:found]
