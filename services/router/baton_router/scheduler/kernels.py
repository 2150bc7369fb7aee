"""The passes over all instances that a decision takes, in C (``native/placement.c``).

A decision among 16 + 16 instances would spend most of its time in a hundred calls of numpy, each on a few numbers. What
is computed is defined in Python: :func:`~baton_router.scheduler.policy.choose_plainly` and ``plain_score`` of the
policies :mod:`~baton_router.scheduler.policies.match_minus_load` and :mod:`~baton_router.scheduler.policies.cost_ms`.

Rows are numpy arrays of the dtypes below, arguments are packed structures; their layout is checked against the library
when this module is imported. Pointers are passed as addresses: the caller keeps the arrays until the call is over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from baton.native import Layout, function
from baton_router.registry.load import layout_of

_POINTER = ctypes.c_void_p
_DATA = ctypes.c_char_p
_INT = ctypes.c_int64
_DOUBLE = ctypes.c_double

SIDE_ROW = Layout("side_row", layout_of, matched="d", match_rate="d", work="d", load="d", sequences="d", waiting="d")
"""An instance as a policy sees it, see :class:`~baton_router.scheduler.policy.Side`."""

LINE_ROW = Layout("line_row", layout_of, block="q", size="q")
LINES = Layout("lines", layout_of, row=LINE_ROW, columns="q", base="d", slope="d", oldest="d")
"""Fields as :meth:`baton_router.scheduler.speeds.Lines.packed` returns them."""

PREFILL_SCORE = Layout(
    "prefill_score", layout_of, missing="d", base="d", slope="d", match="d", queue="d", even="d", total="d"
)  # fmt: skip
"""Terms of a prefill instance; the work that it misses, base and slope of computing it."""
DECODE_SCORE = Layout(
    "decode_score",
    layout_of,
    missing="d",
    lacks="d",
    bound="d",
    load="d",
    total="d",
    local_queue="d",
    local_prefill="d",
    local_stall="d",
    local_total="d",
    store_queue="d",
    store_load="d",
    store_prefill="d",
    store_stall="d",
    store_total="d",
)
"""Terms of a decode instance, of the prefill on it (``local``), and of loading first (``store``); the work that it
misses, the tokens that it lacks, and the upper bound of its pairs' scores. A policy fills those that it has."""
MATCH_ARGS = Layout(
    "match_args",
    layout_of,
    prefill="q",
    decode="q",
    num_prefills="q",
    num_decodes="q",
    computing=LINES,
    decoding=LINES,
    local=LINES,
    tokens="d",
    half="d",
    beta="d",
    prefill_cost="d",
    decode_cost="d",
    with_local="q",
    local_measured="q",
    prefill_scores="q",
    decode_scores="q",
)

COST_ARGS = Layout(
    "cost_args",
    layout_of,
    prefill="q",
    decode="q",
    loadable="q",
    num_prefills="q",
    num_decodes="q",
    computing=LINES,
    decoding=LINES,
    local=LINES,
    store=LINES,
    least="q",
    least_base="d",
    least_slope="d",
    tokens="d",
    half="d",
    sequences="d",
    expected="d",
    kv_bytes="d",
    prefill_cost="d",
    threshold="d",
    prefill_scores="q",
    decode_scores="q",
)

PAIRS = Layout("pairs", layout_of, prefill="q", decode="q", rows="q", moving=LINES, kv_bytes="d", threshold="d")
"""The scores of pairs: addresses of ``PREFILL_SCORE`` and ``DECODE_SCORE`` rows and of the rows of transfers to each
decode instance (0: they cost nothing), columns of the latter, KV bytes per token, missing tokens below which there is
no pair (-1: none)."""
_COLUMN = Layout("column", layout_of, first="q", stride="q")
OPTIONS = Layout(
    "options",
    layout_of,
    prefill=_COLUMN,
    decode=_COLUMN,
    local=_COLUMN,
    store=_COLUMN,
    num_prefills="q",
    num_decodes="q",
)
"""What can be chosen: address and stride of four columns of totals (0, 0: no candidate), and both sides' sizes."""
_CHOICE = Layout("choice", layout_of, decode="q", option="q", score="d")

# With the interpreter's lock held: each takes a few microseconds.
_gather_side = function(
    "gather_side", None, _POINTER, _POINTER, _POINTER, _INT, _DOUBLE, _DOUBLE, _DOUBLE, _POINTER, keep_lock=True
)
_free_rows = function("free_rows", _INT, _POINTER, _INT, _DOUBLE, _DATA, keep_lock=True)
_score_match = function("score_match", ctypes.c_int, _DATA, keep_lock=True)
_score_cost = function("score_cost", None, _DATA, keep_lock=True)
_choose = function("choose", _INT, _DATA, _DATA, _DOUBLE, _DOUBLE, _DATA, keep_lock=True)
_prefill_order = function("prefill_order", _INT, _DATA, _DATA, _INT, _INT, _INT, _POINTER, keep_lock=True)


def gather_side(
    loads: int, matched: int, positions: int, count: int, tokens: float, now: float, recent_s: float, out: int
) -> None:
    """Fill the rows of one role's instances, see :class:`~baton_router.scheduler.policy.Side`.

    Args:
        loads: Address of the rows of :class:`~baton_router.registry.load.LoadColumns`.
        matched: Address of the leading prompt tokens that each of these instances holds, float64.
        positions: Address of the positions to gather, int64; 0: the first ``count``.
        count: Number of instances to gather.
        tokens: Number of prompt tokens, at least 1.
        now: Time by the clock of the loads, in seconds.
        recent_s: Seconds after which work that was done counts 1/e as much.
        out: Address of ``count`` ``SIDE_ROW``.
    """
    _gather_side(loads, matched, positions, count, tokens, now, recent_s, out)


def free_rows(loads: int, count: int, sequences: int) -> bytes:
    """Return the positions of instances with room for a request, see ``LoadTracker.has_room``.

    Args:
        loads: Address of the rows of :class:`~baton_router.registry.load.LoadColumns`.
        count: Number of rows.
        sequences: Number of sequences of the request.

    Returns:
        Positions as int64, rising.
    """
    out = bytes(8 * count)  # not shared yet: filled in place
    size: int = _free_rows(loads, count, sequences, out)
    return out if size == count else out[: 8 * size]


def score_match(arguments: bytes) -> bool:
    """Score both sides for ``match_minus_load``; returns whether the prefill on decode instances was scored.

    Args:
        arguments: Packed ``MATCH_ARGS``.
    """
    return bool(_score_match(arguments))


def score_cost(arguments: bytes) -> None:
    """Score both sides for ``cost_ms``.

    Args:
        arguments: Packed ``COST_ARGS``.
    """
    _score_cost(arguments)


def choose(options: bytes, pairs: bytes | None, draws: Sequence[float]) -> tuple[int, int, int, float]:
    """Choose the best option; equal ones by draw.

    Args:
        options: Packed ``OPTIONS``.
        pairs: Packed ``PAIRS``; ``None``: pairs have no scores of their own.
        draws: Two random numbers, 0 to 1; -1: not drawn yet.

    Returns:
        The number of the draw that is needed for another call, from 1 on, or 0; the decode instance; its option, a
        prefill instance or one of those after these; the score.

    Raises:
        ValueError: A score is not a number.
    """
    choice = ctypes.create_string_buffer(_CHOICE.size)
    need = _choose(options, pairs, *draws, choice)
    if need < 0:
        raise ValueError("a policy's score is not a number")
    return (need, *_CHOICE.unpack_from(choice))


def prefill_order(options: bytes, pairs: bytes | None, decode: int, first: int, limit: int) -> list[int]:
    """Return the best prefill instances for a decode instance, best first.

    Args:
        options: Packed ``OPTIONS``.
        pairs: Packed ``PAIRS``; ``None``: pairs have no scores of their own.
        decode: Position of the decode instance.
        first: Position from which on equal prefill instances come in their order.
        limit: Maximum number of prefill instances.
    """
    out = (ctypes.c_int64 * limit)()
    size: int = _prefill_order(options, pairs, decode, first, limit, ctypes.addressof(out))
    return out[:size]
