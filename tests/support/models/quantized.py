"""Random quantized weights of every form."""

from __future__ import annotations

import torch

from baton_kernels.quantization import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    TableWeight,
    pack_nibbles,
)

FORMS = ["int8", "int8-zeros", "int8-order", "int4", "int4-order", "fp8", "table"]


def make(form: str, rows: int, columns: int, group: int, seed: int = 0) -> QuantizedWeight:
    """A random weight of a form; fp8 with blocks of 4 rows and ``group`` columns."""
    random = torch.Generator().manual_seed(seed)

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=random)

    order = torch.randperm(columns, generator=torch.Generator().manual_seed(99)).int() if "order" in form else None
    groups = (rows, columns // group)
    if form.startswith("int8"):
        values = torch.randint(-128, 128, (rows, columns), generator=random, dtype=torch.int8)
        return Int8Weight(values, normal(*groups), normal(*groups) if form == "int8-zeros" else None, order)
    nibbles = torch.randint(0, 16, (rows, columns), generator=random, dtype=torch.uint8)
    if form.startswith("int4"):
        return Int4Weight(pack_nibbles(nibbles), normal(*groups), normal(*groups).abs() * 8, order)
    if form == "fp8":
        scales = normal(-(-rows // 4), -(-columns // group))
        return Fp8Weight(normal(rows, columns).to(torch.float8_e4m3fn), scales, (4, group))
    return TableWeight(pack_nibbles(nibbles), normal(*groups), torch.linspace(-1, 1, 16))
