"""The forms of quantized weights: what they mean, cut and joined."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.quantized import FORMS, make

from baton_kernels.quantization import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    TableWeight,
    join_weights,
    pack_nibbles,
    unpack_nibbles,
)


def by_hand(weight: QuantizedWeight) -> torch.Tensor:
    """The definition, value by value."""
    out = torch.zeros(weight.rows, weight.columns)
    for row in range(weight.rows):
        for column in range(weight.columns):
            if isinstance(weight, Fp8Weight):
                scale = weight.scales[row // weight.block[0], column // weight.block[1]]
                out[row, column] = weight.values[row, column].float() * scale
                continue
            scale, to = weight.scales[row, column // weight.group], column
            if isinstance(weight, Int8Weight):
                value = weight.values[row, column].float()
            else:
                value = (weight.values[row, column // 2] >> (4 * (column % 2)) & 15).float()
            if isinstance(weight, TableWeight):
                value = weight.table[int(value)]
            else:
                value = value - (0 if weight.zeros is None else weight.zeros[row, column // weight.group])
                to = column if weight.order is None else int(weight.order[column])
            out[row, to] = scale * value
    return out


@pytest.mark.parametrize("form", FORMS)
def test_dequantize_is_the_definition(form: str) -> None:
    weight = make(form, 7, 24, 8)
    assert torch.equal(weight.dequantize(), by_hand(weight))
    assert torch.equal(weight.dequantize(torch.bfloat16), by_hand(weight).bfloat16())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), form=st.sampled_from(FORMS), rows=st.integers(1, 13), groups=st.integers(1, 5))
def test_parts_are_parts_of_the_whole(data: st.DataObject, form: str, rows: int, groups: int) -> None:
    weight = make(form, rows, groups * 4, 4)
    whole = weight.dequantize()
    stop = data.draw(st.integers(1, rows))
    start = data.draw(st.integers(0, stop - 1))
    assert torch.equal(weight.cut_rows(start, stop).dequantize(), whole[start:stop])
    last = 4 * data.draw(st.integers(1, groups))
    first = 4 * data.draw(st.integers(0, last // 4 - 1))
    if "order" in form and (first, last) != (0, weight.columns):
        with pytest.raises(ValueError, match="act order"):
            weight.cut_columns(first, last)
    else:
        assert torch.equal(weight.cut_columns(first, last).dequantize(), whole[:, first:last])


@settings(max_examples=60, deadline=None)
@given(form=st.sampled_from(FORMS), rows=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_joined_weights_stand_below_each_other(form: str, rows: list[int]) -> None:
    weights = [make(form, each, 16, 8, seed) for seed, each in enumerate(rows)]
    assert torch.equal(join_weights(weights).dequantize(), torch.cat([each.dequantize() for each in weights]))


def test_a_zero_that_only_one_of_the_joined_has_stays_its_own() -> None:
    weights = [make("int8", 3, 16, 8), make("int8-zeros", 2, 16, 8)]
    assert torch.equal(join_weights(weights).dequantize(), torch.cat([each.dequantize() for each in weights]))


def test_scales_per_tensor_are_joined_as_scales_per_row() -> None:
    weights = [Fp8Weight(make("fp8", 3, 8, 8).values, torch.full((1, 1), scale), (3, 8)) for scale in (1.0, 2.0)]
    weights.append(Fp8Weight(make("fp8", 5, 8, 8).values, torch.full((1, 1), 3.0), (5, 8)))
    assert torch.equal(join_weights(weights).dequantize(), torch.cat([each.dequantize() for each in weights]))


def test_a_channel_scale_goes_with_every_part_of_its_columns() -> None:
    for form in ("int8", "int4", "table"):
        weight = make(form, 3, 24, 24)
        assert torch.equal(weight.cut_columns(8, 18).dequantize(), weight.dequantize()[:, 8:18])


@pytest.mark.parametrize("form", ["int8", "int4", "fp8", "table"])
def test_what_would_cut_a_group_is_refused(form: str) -> None:
    for start, stop in ((0, 12), (4, 16)):
        with pytest.raises(ValueError, match="cut a group of 8"):
            make(form, 4, 24, 8).cut_columns(start, stop)


def test_weights_that_differ_are_not_joined() -> None:
    for one, other in (
        (make("int8", 3, 16, 8), make("int4", 3, 16, 8)),
        (make("int8", 3, 16, 8), make("int8", 3, 16, 4)),
        (make("int8", 3, 16, 8), make("int8-order", 3, 16, 8)),
        (make("fp8", 4, 16, 8), make("fp8", 4, 16, 4)),
        (make("fp8", 4, 16, 8), make("fp8", 4, 24, 8)),
        (make("table", 4, 16, 8), TableWeight(make("table", 4, 16, 8).values, torch.ones(4, 2), torch.zeros(16))),
    ):
        with pytest.raises(ValueError, match="cannot be joined"):
            join_weights([one, other])


def test_tensors_that_do_not_fit_are_refused() -> None:
    values, nibbles = torch.zeros(4, 16, dtype=torch.int8), torch.zeros(4, 8, dtype=torch.uint8)
    scales = torch.ones(4, 2)
    with pytest.raises(ValueError, match="values must be"):
        Int8Weight(nibbles, scales)
    with pytest.raises(ValueError, match="do not fit"):
        Int8Weight(values, torch.ones(3, 2))
    with pytest.raises(ValueError, match="do not fit"):
        Int4Weight(nibbles, torch.ones(4, 3), torch.ones(4, 3))
    with pytest.raises(ValueError, match="zeros are"):
        Int4Weight(nibbles, scales, torch.ones(4, 1))
    with pytest.raises(ValueError, match="scales must be"):
        TableWeight(nibbles, scales.double(), torch.ones(16))
    with pytest.raises(ValueError, match="table must be"):
        TableWeight(nibbles, scales, torch.ones(8))
    with pytest.raises(ValueError, match="blocks of"):
        Fp8Weight(torch.zeros(4, 16).to(torch.float8_e4m3fn), scales, (4, 8))
    with pytest.raises(ValueError, match="each of 16 columns once"):
        Int8Weight(values, scales, None, torch.zeros(16, dtype=torch.int32))


@given(values=st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda each: len(each) % 2 == 0))
@settings(deadline=None)
def test_nibbles_come_back(values: list[int]) -> None:
    assert unpack_nibbles(pack_nibbles(torch.tensor(values))).tolist() == values
