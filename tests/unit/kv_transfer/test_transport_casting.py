"""Conversion of KV between dtypes, against ``torch.Tensor.to`` bit for bit."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from tests.support.transport.transport_rig import soon

from baton.errors import CancelledError, ConfigError
from baton.kv_cache.layout import CODES, FLOAT_BYTES
from baton.kv_transfer.native_copy import Cast, convert, read_casting
from baton.kv_transfer.streams import Wait
from baton.kv_transfer.types import BlockReads
from baton_kernels.paged_attention.quantized import quantize_rows

PAIRS = [(a, b) for a in FLOAT_BYTES for b in FLOAT_BYTES if a != b]
VECTOR_BITS = [512, 256, 64]
"""Bounds on the vector registers that are used."""


def every_number(dtype: str) -> torch.Tensor:
    """Every number of 16 bits; of 32 bits those next to what 16 bits can hold, next to powers of two, and some more."""
    if dtype != "float32":
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(getattr(torch, dtype))
    halves = [every_number(name).float() for name in ("bfloat16", "float16")]
    bits = torch.cat([*halves, torch.randn(1 << 15), torch.randn(1 << 12) * 1e-6]).view(torch.int32)
    middle = torch.arange(0, 512, dtype=torch.int32) << 23 | torch.randint(0, 1 << 23, (512,), dtype=torch.int32)
    near = [bits + step for step in (-1, 0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001)]
    return torch.cat([*near, middle]).view(torch.float32)


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def cast_rows(target: np.ndarray, source: np.ndarray, casts: list[tuple[int, ...]], *, vector_bits: int = 512) -> Cast:
    """Convert all blocks into the target's of the same number."""
    ids, gens = np.arange(len(source)), np.zeros(len(source), np.uint64)
    reads = BlockReads(ids, gens, ids, casts=np.array(casts))
    return read_casting(target, source, gens, reads, Wait(soon()), vector_bits=vector_bits)


@pytest.mark.parametrize("vector_bits", VECTOR_BITS)
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_every_number_is_what_torch_makes_of_it(pair: tuple[str, str], vector_bits: int) -> None:
    torch.manual_seed(0)
    numbers = every_number(pair[0])
    expected = numbers.to(getattr(torch, pair[1]))
    row = 61  # a tail beside whole vectors
    count = numbers.numel() // row
    source = bytes_of(numbers[: count * row]).reshape(count, -1)
    target = np.zeros((count, expected.element_size() * row), np.uint8)
    casts = [(0, -1, 0, -1, 1, row, CODES[pair[0]], CODES[pair[1]])]
    cast = cast_rows(target, source, casts, vector_bits=vector_bits)
    made = torch.from_numpy(target).view(expected.dtype)
    wanted = expected[: count * row].reshape(count, row)
    same = torch.from_numpy((target.reshape(count, row, -1) == bytes_of(wanted).reshape(count, row, -1)).all(axis=2))
    none = wanted.isnan()
    assert torch.equal(made.isnan(), none)
    assert (same | none).all()
    lost = (numbers[: count * row].reshape(count, row).isfinite() & wanted.isinf()).any(dim=1).numpy()
    assert np.array_equal(cast.out_of_range, lost)
    assert np.array_equal(cast.valid, ~lost)
    assert lost.any() == (pair in {("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float16")})


HALVES = CODES["float32"], CODES["bfloat16"]


def test_only_blocks_with_their_generation_are_converted_and_only_their_rows() -> None:
    source = bytes_of(torch.arange(24.0).reshape(3, 8))
    target = np.full((4, 16), 0xEE, np.uint8)
    gens = np.array([7, 8, 9], np.uint64)
    casts = np.array([(8, -1, 0, -1, 1, 2, *HALVES), (20, -1, 6, -1, 1, 1, *HALVES)])
    reads = BlockReads(np.array([2, 0, 1]), np.array([9, 7, 5], np.uint64), np.array([0, 3, 1]), casts=casts)
    cast = read_casting(target, source, gens, reads, Wait(soon()))
    assert cast.valid.tolist() == [True, True, False]
    assert not cast.out_of_range.any()
    expected = torch.from_numpy(np.full((4, 16), 0xEE, np.uint8)).view(torch.bfloat16)
    for local, remote in ((0, 2), (3, 0)):
        expected[local, :2] = torch.tensor([remote * 8 + 2, remote * 8 + 3])
        expected[local, 3] = remote * 8 + 5
    assert np.array_equal(target, bytes_of(expected))


def test_a_block_whose_generation_changes_under_its_conversion_is_not_valid() -> None:
    """The numbers are written over the generations, so that they change while it goes on."""
    target = np.zeros((3, 8), np.uint8)
    generations = target[2].view(np.uint64)
    source = bytes_of(torch.ones(1, 4))
    casts = np.array([(0, -1, 0, -1, 1, 4, *HALVES)])
    reads = BlockReads(np.zeros(1, np.int64), np.zeros(1, np.uint64), np.array([2]), casts=casts)
    cast = read_casting(target, source, generations, reads, Wait(soon()))
    assert generations[0] != 0
    assert not cast.valid.any()
    assert not cast.out_of_range.any()


def test_a_conversion_looks_at_the_flag_and_rows_of_what_is_no_float_are_refused() -> None:
    flag = threading.Event()
    flag.set()
    empty = np.zeros((1, 64), np.uint8)
    casts = np.array([(0, -1, 0, -1, 1, 1, *HALVES)])
    reads = BlockReads(np.zeros(1, np.int64), np.zeros(1, np.uint64), np.zeros(1, np.int64), casts=casts)
    with pytest.raises(CancelledError):
        read_casting(empty, empty, np.zeros(1, np.uint64), reads, Wait(soon(), flag))
    for pair in (("float32", "int8"), ("float8", "float16")):
        with pytest.raises(ConfigError, match="cannot be converted"):
            convert(empty, *pair)


ROWS, DIM = 7, 1037
"""More numbers than are converted at once, and no whole number of vectors."""


def rows_of_all_sizes() -> torch.Tensor:
    """Rows [30, ROWS, DIM] of magnitudes from below the least normal number up; some have infinities, or no numbers."""
    torch.manual_seed(0)
    rows = torch.randn(30, ROWS, DIM) * 10.0 ** torch.linspace(-44, 37, 30 * ROWS).reshape(30, ROWS, 1)
    rows[3, 2] = 0
    rows[4, 3, 7], rows[5, 4, 1036] = float("inf"), float("nan")
    return rows


@pytest.mark.parametrize("vector_bits", VECTOR_BITS)
@pytest.mark.parametrize("dtype", FLOAT_BYTES)
def test_int8_is_what_the_engine_writes(dtype: str, vector_bits: int) -> None:
    rows = rows_of_all_sizes().to(getattr(torch, dtype))
    q, scales = quantize_rows(rows)
    target = np.full((len(rows), 2 * ROWS + ROWS * DIM), 0xEE, np.uint8)
    casts = [(0, -1, 2 * ROWS, 0, ROWS, DIM, CODES[dtype], CODES["int8"])]
    cast = cast_rows(target, bytes_of(rows.flatten(1)), casts, vector_bits=vector_bits)
    assert cast.valid.all()
    made = torch.from_numpy(target[:, : 2 * ROWS].copy()).view(torch.bfloat16)
    assert torch.equal(made.isnan(), scales.isnan())
    assert torch.equal(made.nan_to_num(), scales.nan_to_num())
    assert np.array_equal(target[:, 2 * ROWS :], bytes_of(q.flatten(1)))


@pytest.mark.parametrize("vector_bits", VECTOR_BITS)
@pytest.mark.parametrize("dtype", FLOAT_BYTES)
def test_int8_becomes_floats(dtype: str, vector_bits: int) -> None:
    q, scales = quantize_rows(rows_of_all_sizes())
    source = np.concatenate([bytes_of(scales), bytes_of(q.flatten(1))], axis=1)
    target = np.zeros((len(q), ROWS * DIM * FLOAT_BYTES[dtype]), np.uint8)
    casts = [(2 * ROWS, 0, 0, -1, ROWS, DIM, CODES["int8"], CODES[dtype])]
    cast = cast_rows(target, source, casts, vector_bits=vector_bits)
    exact = q.float() * scales.float()[..., None]
    wanted = exact.to(getattr(torch, dtype)).flatten(1)
    made = torch.from_numpy(target).view(wanted.dtype)
    assert torch.equal(made.isnan(), wanted.isnan())
    assert torch.equal(made.nan_to_num(), wanted.nan_to_num())
    lost = (exact.flatten(1).isfinite() & wanted.isinf()).any(dim=1).numpy()
    assert np.array_equal(cast.out_of_range, lost)
    assert lost.any() == (dtype == "float16")


def test_rows_are_converted_one_by_one() -> None:
    rows = torch.tensor([[1.5, -2.0], [1e6, 1.0], [float("inf"), 0.0]])
    made, lost = convert(bytes_of(rows), "float32", "float16")
    assert torch.equal(torch.from_numpy(made).view(torch.float16), rows.half())
    assert lost.tolist() == [False, True, False]
