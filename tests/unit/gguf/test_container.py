"""The container: what is read, and that nothing in it is believed."""

import resource
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.gguf_files import finish

from baton.errors import ConfigError
from baton.gguf.container import MAX_PAIRS, MAX_TENSORS, TENSOR_TYPES, read_gguf
from baton.gguf.files import open_gguf


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def whole(pairs: list[bytes], tensors: list[bytes], data: int = 0, **changes: Any) -> bytes:
    counts = changes.get("num_tensors", len(tensors)), changes.get("num_pairs", len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", changes.get("version", 3), *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


ALIGNMENT = "general.alignment"
REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file, or truncated"),
    "short": (b"GGUF\3\0\0\0", "not a GGUF file, or truncated"),
    "magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "version 1": (whole([], [], version=1, data=32), "GGUF version 1; Baton reads 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(16), "a big-endian GGUF file"),
    "pairs": (whole([], [], num_pairs=MAX_PAIRS + 1), "more than a model has"),
    "tensors": (whole([], [], num_tensors=MAX_TENSORS + 1), "more than a model has"),
    "pairs missing": (
        whole([], [], num_pairs=3),
        "'': truncated: 4 bytes wanted at byte 32 of 32",
    ),
    "long key": (whole([struct.pack("<Q", 1 << 40)], []), "metadata pair 0: a string of 1099511627776 bytes"),
    "key beyond the end": (whole([struct.pack("<Q", 60000)], []), "metadata pair 0: truncated: 60000 bytes wanted"),
    "key twice": (whole([pair("a", 7, b"\1"), pair("a", 7, b"\1")], []), "the key 'a' twice"),
    "not UTF-8": (whole([pair("a", 8, struct.pack("<Q", 1) + b"\xff")], []), "'a': a string that is not UTF-8"),
    "bool of 2": (whole([pair("a", 7, b"\2")], []), "'a': a bool of 2"),
    "type": (whole([pair("a", 13, bytes(8))], []), "'a': a value of the unknown type 13"),
    "long string": (whole([pair("a", 8, struct.pack("<Q", 1 << 62))], []), "'a': a string of 4611686018427387904"),
    "array type": (whole([pair("a", 9, struct.pack("<IQ", 99, 1))], []), "'a': a value of the unknown type 99"),
    "nested array": (whole([pair("a", 9, struct.pack("<IQ", 9, 1))], []), "'a': arrays of arrays"),
    "long array": (whole([pair("a", 9, struct.pack("<IQ", 6, 1 << 61))], []), "'a': truncated: an array of 2305"),
    "strings": (whole([pair("a", 9, struct.pack("<IQ", 8, 1 << 62))], []), "'a': an array of 4611686018427387904 str"),
    "alignment 0": (whole([pair(ALIGNMENT, 4, bytes(4))], []), "general.alignment is 0, not a power of two"),
    "alignment 48": (whole([pair(ALIGNMENT, 4, struct.pack("<I", 48))], []), "general.alignment is 48"),
    "alignment text": (whole([pair(ALIGNMENT, 8, string("32"))], []), "general.alignment is '32'"),
    "no dimensions": (whole([], [tensor("t", [])], 32), "tensor 't': has 0 dimensions"),
    "five dimensions": (whole([], [tensor("t", [1] * 5)], 32), "tensor 't': has 5 dimensions"),
    "dimension 0": (whole([], [tensor("t", [0])], 32), "tensor 't': shape .0. has more values .* or none"),
    "overflow": (whole([], [tensor("t", [1 << 32, 1 << 32])], 32), "tensor 't': shape .* has more values"),
    "tensor type": (whole([], [tensor("t", [8], 99)], 32), "tensor 't': is of type 99, which Baton does not read"),
    "IQ4_XS": (whole([], [tensor("t", [256], 23)], 256), "tensor 't': is of type IQ4_XS, which Baton does not read"),
    "row": (whole([], [tensor("t", [48, 2], 8)], 999), "tensor 't': rows of 48 values are not whole blocks of 32"),
    "offset": (whole([], [tensor("t", [8], 0, 4)], 64), "tensor 't': its offset 4 is not aligned to 32"),
    "far offset": (whole([], [tensor("t", [8], 0, 1 << 62)], 64), "tensor 't': truncated: its data ends at byte"),
    "cut": (whole([], [tensor("t", [64])], 128), "tensor 't': truncated: its data ends at byte 320 of 192"),
    "tensor twice": (whole([], [tensor("t", [8]), tensor("t", [8], 0, 32)], 64), "tensor 't': stands twice"),
    "overlap": (whole([], [tensor("s", [64]), tensor("t", [8], 0, 32)], 256), "tensor 't': overlaps 's'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_why(tmp_path: Path, name: str) -> None:
    content, why = REFUSED[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=why) as refused:
        read_gguf(path)
    assert refused.value.message.startswith(f"{path}: ")
    assert "\n" not in refused.value.message
    assert refused.value.field == "model"


def test_values_of_all_types_come_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {
        "uint8": 200, "int8": -3, "uint16": 60000, "int16": -30000, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 1e-5, "float64": 0.1,
    }  # fmt: skip
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_bool("yes", True)
    writer.add_string("text", "Grüße")
    writer.add_array("words", ["a", "", "ž"])
    writer.add_array("scores", [0.5, -1.0])
    writer.add_array("flags", [True, False])
    matrix = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer.add_tensor("a.weight", matrix)
    packed = gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("b.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish(writer)
    found = read_gguf(path)
    assert {name: found.metadata[name] for name in numbers} == numbers
    assert found.metadata["yes"] is True
    assert found.metadata["text"] == "Grüße"
    assert found.metadata["words"] == ["a", "", "ž"]
    assert np.array_equal(found.metadata["scores"], np.array([0.5, -1.0], np.float32))
    a, b = found.tensors["a.weight"], found.tensors["b.weight"]
    assert (a.shape, a.type.name, b.shape, b.type.name) == ((3, 32), "F32", (3, 32), "Q8_0")
    content = path.read_bytes()
    assert content[a.offset : a.offset + a.nbytes] == matrix.tobytes()
    assert content[b.offset : b.offset + b.nbytes] == packed.tobytes()


def test_types_are_as_long_as_the_package_says() -> None:
    for number, kind in TENSOR_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.block, kind.nbytes)


GOOD = whole(
    [pair("general.architecture", 8, string("llama")), pair("n", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3))],
    [tensor("t", [32, 4], 8), tensor("u", [8], 0, 160)],
    192,
)


def test_every_beginning_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GOOD)
    assert list(read_gguf(path).tensors) == ["t", "u"]
    for end in range(len(GOOD)):
        path.write_bytes(GOOD[:end])
        with pytest.raises(ConfigError):
            read_gguf(path)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, len(GOOD) - 8), value=st.integers(0, 2**64 - 1))
def test_any_eight_bytes_changed_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(GOOD[:at] + struct.pack("<Q", value) + GOOD[at + 8 :])
    try:
        found = read_gguf(path)
    except ConfigError as error:
        message = error.message
    else:
        message = ""
        for info in found.tensors.values():
            assert found.header_bytes <= info.offset <= info.offset + info.nbytes <= found.size
    assert "\n" not in message


def test_memory_is_not_taken_for_what_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind, count in ((8, 1 << 22), (6, 1 << 33), (12, 1 << 40)):
        path.write_bytes(whole([pair("a", 9, struct.pack("<IQ", kind, count))], [], 1 << 16))
        with pytest.raises(ConfigError):
            read_gguf(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * 1024  # KiB


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GOOD)
    first = open_gguf(path)
    assert open_gguf(path) is first
    (tmp_path / "new.gguf").write_bytes(GOOD + bytes(32))
    (tmp_path / "new.gguf").replace(path)
    assert open_gguf(path).file.size == len(GOOD) + 32
