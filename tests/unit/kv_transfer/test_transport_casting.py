"""Conversion of KV between dtypes, against ``torch.Tensor.to`` bit for bit."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from tests.support.transport_rig import soon

from baton.errors import CancelledError, ConfigError
from baton.kv_transfer.copy.block_copy import FORMATS, BlockCaster, convert
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.types import BlockReads

PAIRS = [(a, b) for a in FORMATS for b in FORMATS if a != b]
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


@pytest.mark.parametrize("vector_bits", VECTOR_BITS)
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_every_number_is_what_torch_makes_of_it(pair: tuple[str, str], vector_bits: int) -> None:
    caster = BlockCaster(*pair, vector_bits=vector_bits)
    torch.manual_seed(0)
    numbers = every_number(pair[0])
    expected = numbers.to(getattr(torch, pair[1]))
    row = 61  # a tail beside whole vectors
    count = numbers.numel() // row
    source = bytes_of(numbers[: count * row]).reshape(count, -1)
    target = np.zeros((count, expected.element_size() * row), np.uint8)
    ids, gens = np.arange(count), np.zeros(count, np.uint64)
    reads = BlockReads(ids, gens, ids, np.array([[0, 0, source.shape[1]]]))
    cast = caster.read(target, source, gens, reads, Wait(soon()))
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


def test_only_blocks_with_their_generation_are_converted_and_only_their_segments() -> None:
    caster = BlockCaster("float32", "bfloat16")
    source = bytes_of(torch.arange(24.0).reshape(3, 8))
    target = np.full((4, 16), 0xEE, np.uint8)
    gens = np.array([7, 8, 9], np.uint64)
    reads = BlockReads(
        np.array([2, 0, 1]), np.array([9, 7, 5], np.uint64), np.array([0, 3, 1]), np.array([[8, 0, 8], [20, 12, 4]])
    )
    cast = caster.read(target, source, gens, reads, Wait(soon()))
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
    reads = BlockReads(np.zeros(1, np.int64), np.zeros(1, np.uint64), np.array([2]), np.array([[0, 0, 16]]))
    caster = BlockCaster("float32", "bfloat16")
    cast = caster.read(target, source, generations, reads, Wait(soon()))
    assert generations[0] != 0
    assert not cast.valid.any()
    assert not cast.out_of_range.any()


def test_a_conversion_looks_at_the_flag_and_refuses_what_is_none() -> None:
    caster, flag = BlockCaster("float32", "float16"), threading.Event()
    flag.set()
    empty = np.zeros((1, 64), np.uint8)
    reads = BlockReads(np.zeros(1, np.int64), np.zeros(1, np.uint64), np.zeros(1, np.int64), np.array([[0, 0, 4]]))
    with pytest.raises(CancelledError):
        caster.read(empty, empty, np.zeros(1, np.uint64), reads, Wait(soon(), flag))
    for pair in (("float32", "float32"), ("float32", "int8"), ("float8", "float16")):
        with pytest.raises(ConfigError, match="cannot be converted"):
            BlockCaster(*pair)


def test_rows_are_converted_one_by_one() -> None:
    rows = torch.tensor([[1.5, -2.0], [1e6, 1.0], [float("inf"), 0.0]])
    made, lost = convert(bytes_of(rows), "float32", "float16")
    assert torch.equal(torch.from_numpy(made).view(torch.float16), rows.half())
    assert lost.tolist() == [False, True, False]
