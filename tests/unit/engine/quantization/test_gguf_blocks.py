"""Blocks of GGUF's tensor types against the gguf package."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from tests.support.models.gguf_files import HALVES, WRITTEN, random_blocks

from baton.engine.quantization.formats.gguf import is_quantized, unpack_blocks
from baton_kernels.quantization import Int4Weight, Int8Weight


@pytest.mark.parametrize("kind", HALVES)
def test_any_blocks_mean_what_the_package_says(kind: str) -> None:
    data = random_blocks(kind, 24, 5, np.random.default_rng(1))
    expected = torch.from_numpy(dequantize(data, GGMLQuantizationType[kind]))
    weight = unpack_blocks(kind, torch.from_numpy(data))
    assert isinstance(weight, Int8Weight if kind in {"Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"} else Int4Weight)
    assert (weight.rows, weight.columns) == tuple(expected.shape)
    largest = expected.view(24, -1, weight.group).abs().amax(-1, keepdim=True)
    error = (weight.dequantize().view(24, -1, weight.group) - expected.view(24, -1, weight.group)).abs()
    assert (error <= largest * 3e-7).all()  # float32's rounding of the zero
    assert (weight.scales != 0).all()


@pytest.mark.parametrize("kind", WRITTEN)
def test_quantized_by_the_package(kind: str) -> None:
    weight = np.random.default_rng(2).normal(0, 0.1, (16, 256)).astype(np.float32)
    data = quantize(weight, GGMLQuantizationType[kind])
    found = unpack_blocks(kind, torch.from_numpy(data)).dequantize()
    torch.testing.assert_close(found, torch.from_numpy(dequantize(data, GGMLQuantizationType[kind])), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_scales_that_are_no_numbers_are_refused(kind: str, value: float) -> None:
    data = random_blocks(kind, 2, 3, np.random.default_rng(3))
    at = HALVES[kind][0]
    data[1, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="a scale is infinite or no number"):
        unpack_blocks(kind, torch.from_numpy(data))


def test_groups_without_a_scale_are_their_minimum() -> None:
    data = np.zeros((1, 20), np.uint8)
    data[0, 2:4] = np.array([-0.5], np.float16).view(np.uint8)
    data[0, 4:] = 0x5A
    assert (unpack_blocks("Q4_1", torch.from_numpy(data)).dequantize() == -0.5).all()
    assert (unpack_blocks("Q4_0", torch.zeros(1, 18, dtype=torch.uint8)).dequantize() == 0).all()


def test_plain_types_have_no_blocks() -> None:
    assert not any(map(is_quantized, ("F32", "F16", "BF16")))
