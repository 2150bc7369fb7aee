"""What Python hands to the C++ operators has the fields that these read, in order and kind."""

from __future__ import annotations

import ctypes
import re
import struct

import pytest

from baton_kernels import sampling
from baton_kernels.cpu.library import SOURCES, NativeCall
from baton_kernels.experts import ExpertsCall, RoutingCall
from baton_kernels.linear import LinearCall
from baton_kernels.paged_attention.cpu import AttentionCall
from baton_kernels.quantized_experts import QuantizedExpertsCall
from baton_kernels.quantized_linear import QuantizedCall, QuantizedShape
from baton_kernels.row_wise import RowCall
from baton_kernels.sampling import RowFilter, SampleCall
from baton_kernels.token_mask import TokenMaskCall

CALLS = {
    "Attention": AttentionCall,
    "Linear": LinearCall,
    "RowOp": RowCall,
    "Routing": RoutingCall,
    "Experts": ExpertsCall,
    "QuantizedShape": QuantizedShape,
    "QuantizedLinear": QuantizedCall,
    "QuantizedExperts": QuantizedExpertsCall,
    "TokenMaskOp": TokenMaskCall,
    "SampleOp": SampleCall,
    "Call": NativeCall,
}
KINDS = {
    ctypes.c_void_p: "pointer",
    ctypes.c_char_p: "pointer",
    ctypes.c_int32: "int32_t",
    ctypes.c_int64: "int64_t",
    ctypes.c_float: "float",
    QuantizedShape: "QuantizedShape",
}
Fields = list[tuple[str, str]]


def header_fields() -> dict[str, Fields]:
    """Return names and kinds of the fields of each structure of ``operators.h``."""
    text = re.sub(r"//.*", "", (SOURCES / "operators.h").read_text(encoding="utf-8"))
    found: dict[str, Fields] = {}
    for name, body in re.findall(r"^struct (\w+) \{(.*?)^\};", text, re.DOTALL | re.MULTILINE):
        data = re.sub(r"[^;{}]*\) const \{[^}]*\}", "", body)  # but for functions
        found[name] = [field for line in data.split(";") if line.strip() for field in declared(line)]
    return found


def declared(line: str) -> Fields:
    """Return the fields of a declaration, such as ``const float *bias, *scales``."""
    if pointer := re.search(r"\(\*(\w+)\)", line):  # to a function
        return [(pointer[1], "pointer")]
    first, *others = line.split(",")
    kind, name = re.fullmatch(r"\s*(?:const )?(\w+)(.*)", first, re.DOTALL).groups()  # type: ignore[union-attr]
    return [(re.findall(r"\w+", one)[-1], "pointer" if "*" in one else kind) for one in (name, *others)]


@pytest.mark.parametrize("name", CALLS)
def test_structures_are_those_of_the_operators(name: str) -> None:
    ours = [(field, KINDS[kind]) for field, kind, *_ in CALLS[name]._fields_]
    assert ours == header_fields()[name]


def test_every_structure_of_the_operators_is_compared() -> None:
    assert header_fields().keys() == CALLS.keys() | {"Filter"}


def test_filters_are_packed_as_the_operator_reads_them() -> None:
    fields = header_fields()["Filter"]
    assert fields == [("temperature", "float"), ("top_p", "float"), ("min_p", "float"), ("top_k", "int32_t")]
    packed = sampling._packed(RowFilter(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125))
    assert struct.unpack("=fffi", packed) == (0.5, 0.25, 0.125, 7)
