"""Weights as they are held in memory, and plain tensors as pages of their file: the same numbers, in fewer bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.models.quantized import FORMS, make

from baton.engine.models.checkpoint import MAPPED_BYTES, TensorFiles
from baton.engine.quantization.modules import CompactWeight
from baton.errors import ConfigError
from baton.tokenizer.weight_files import read_header
from baton_kernels.quantization import Int4Weight, Int8Weight, QuantizedWeight

ROWS, COLUMNS, GROUP = 96, 512, 32
NUMBERS = ROWS * COLUMNS // GROUP


def same(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Whether all tensors are equal to the last bit, and of the same types."""
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)]
    return type(one) is type(other) and all(
        a.dtype == b.dtype and torch.equal(a.float(), b.float()) if isinstance(a, torch.Tensor) else a == b
        for a, b in pairs
    )


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_kept_to_the_last_bit(form: str) -> None:
    weight = make(form, ROWS, COLUMNS, GROUP)
    kept = CompactWeight(weight)
    assert same(kept.get(), weight)
    assert kept.nbytes == weight.nbytes  # numbers of 24 bits fit nothing narrower
    weight.values.view(torch.uint8).zero_()
    assert bool(kept.get().values.view(torch.uint8).any())  # it is a copy


@pytest.mark.parametrize(
    ("scales", "zeros", "bytes_each"),
    [
        (torch.bfloat16, None, 2),
        (torch.float16, None, 2),
        (torch.float32, None, 4),
        (torch.bfloat16, "integers", 3),
        (torch.float16, "halves", 4),
        (torch.float32, "any", 8),
        (torch.bfloat16, "one", 2),
        (torch.bfloat16, "beyond int8", 4),
    ],
    ids=str,
)
def test_numbers_take_as_few_bytes_as_hold_them(scales: torch.dtype, zeros: str | None, bytes_each: int) -> None:
    random = torch.Generator().manual_seed(3)
    shape = (ROWS, COLUMNS // GROUP)
    numbers = torch.randn(shape, generator=random).to(scales).float() + 0.0
    found = {
        None: None,
        "integers": torch.randint(0, 16, shape, generator=random).float(),
        "halves": torch.randint(0, 32, shape, generator=random).float() / 2,
        "any": torch.randn(shape, generator=random),
        "one": torch.full(shape, 8.0),
        "beyond int8": torch.randint(-1000, 1000, shape, generator=random).float(),
    }[zeros]
    values = torch.randint(-128, 128, (ROWS, COLUMNS), generator=random, dtype=torch.int8)
    weight = Int8Weight(values, numbers, found)
    kept = CompactWeight(weight)
    assert same(kept.get(), weight)
    assert kept.nbytes == ROWS * COLUMNS + bytes_each * NUMBERS + (4 if zeros == "one" else 0)


def test_one_zero_for_all_stays_one() -> None:
    scales = torch.ones(ROWS, COLUMNS // GROUP)
    weight = Int4Weight(torch.zeros(ROWS, COLUMNS // 2, dtype=torch.uint8), scales, torch.tensor(8.0).expand_as(scales))
    kept = CompactWeight(weight)
    assert same(kept.get(), weight)
    assert kept.nbytes == ROWS * COLUMNS // 2 + 2 * NUMBERS + 4


def files(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorFiles:
    path = folder / "model.safetensors"
    save_file(tensors, path)
    return TensorFiles([read_header(path)])


def test_plain_tensors_are_pages_of_the_file(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(4)
    tensors = {
        "large": torch.randn(300, 301, generator=random).bfloat16(),
        "small": torch.randn(7, generator=random),
        "bytes": torch.randint(0, 255, (MAPPED_BYTES + 3,), generator=random, dtype=torch.uint8),
        "none": torch.empty(0, 4),
    }
    source = files(tmp_path, tensors)
    kept = {name: source.read_or_map(name) for name in tensors}
    for _ in range(2):
        assert all(
            torch.equal(kept[name], tensor) and kept[name].dtype == tensor.dtype for name, tensor in tensors.items()
        )
        assert resident(tmp_path) > 0
        source.drop_pages()
        assert resident(tmp_path) == 0


def resident(folder: Path) -> int:
    """Bytes of a folder's files that are mapped here and in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_a_file_that_was_cut_meanwhile(tmp_path: Path) -> None:
    source = files(tmp_path, {"x": torch.zeros(MAPPED_BYTES)})
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(ConfigError, match=r"model\.safetensors: x: the file ends in it"):
        source.read_or_map("x")
