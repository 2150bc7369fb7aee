from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError, FingerprintMismatchError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape

shapes = st.builds(LayerShape, st.integers(1, 8), st.integers(1, 96), st.integers(1, 96))


@given(
    layers=st.lists(shapes, min_size=1, max_size=6),
    block_size=st.integers(1, 32),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_layers_lie_behind_one_another_without_overlap(layers, block_size, dtype):
    layout = KVLayout(tuple(layers), block_size, dtype)
    at = 0
    for i, layer in enumerate(layers):
        assert layout.layer_offsets[i] == at
        assert layout.v_offset(i) == at + layer.kv_heads * layer.k_dim * block_size
        at = layout.v_offset(i) + layer.kv_heads * layer.v_dim * block_size
    assert at <= layout.block_elements < at + 64
    assert layout.block_bytes % 64 == 0
    assert layout.bytes_per_token * block_size <= layout.block_bytes


def test_llama_8b_has_2_mib_blocks():
    layout = KVLayout((LayerShape(8, 128, 128),) * 32, 16, "bfloat16")
    assert (layout.block_bytes, layout.bytes_per_token) == (2 * 2**20, 128 * 2**10)
    assert layout.num_blocks_for(17) == 2


@pytest.mark.parametrize(("changes", "field"), [({"block_size": 0}, "block_size"), ({"dtype": "int3"}, "kv_dtype")])
def test_a_layout_that_cannot_be_names_its_field(changes, field):
    values = {"layers": (LayerShape(1, 8, 8),), "block_size": 16, "dtype": "float32", **changes}
    with pytest.raises(ConfigError) as caught:
        KVLayout(**values)
    assert caught.value.field == field


FINGERPRINT = Fingerprint.of(
    model="m", model_digest="d", rope="r", layout=KVLayout((LayerShape(2, 8, 8),) * 2, 16, "float32")
)
OTHER = {
    bool: lambda v: not v,
    str: lambda v: v + "x",
    int: lambda v: v + 1,
    tuple: lambda v: v[:-1] if v else (0,),
}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Fingerprint)])
def test_every_field_but_the_label_is_compared(name):
    value = getattr(FINGERPRINT, name)
    other = dataclasses.replace(FINGERPRINT, **{name: OTHER[type(value)](value)})
    if name == "model":
        FINGERPRINT.require_equal(other)
        assert other.digest() == FINGERPRINT.digest()
        return
    assert other.digest() != FINGERPRINT.digest()
    with pytest.raises(FingerprintMismatchError) as caught:
        FINGERPRINT.require_equal(other)
    assert caught.value.field == name


def test_ranks_share_block_hashes_and_models_do_not():
    assert dataclasses.replace(FINGERPRINT, tp_size=2).content_key() == FINGERPRINT.content_key()
    assert dataclasses.replace(FINGERPRINT, model_digest="e").content_key() != FINGERPRINT.content_key()


def test_kv_that_may_have_been_converted_is_named_otherwise_and_other_kv_as_ever():
    casting = dataclasses.replace(FINGERPRINT, kv_cast=True)
    assert casting.content_key() != FINGERPRINT.content_key()
    assert casting.digest() != FINGERPRINT.digest()
    # What stores have kept since before there was casting is found.
    assert FINGERPRINT.content_key().hex()[:16] == "b240cad82835b791"
    assert FINGERPRINT.digest().hex()[:16] == "1e28329d0c7c33e5"


HALF = dataclasses.replace(FINGERPRINT, kv_dtype="bfloat16", block_bytes=FINGERPRINT.block_bytes // 2)


@pytest.mark.parametrize(
    ("reader", "reader_casts", "source", "source_casts", "field"),
    [
        (HALF, False, HALF, False, None),
        (HALF, False, FINGERPRINT, False, "kv_dtype"),
        (HALF, True, FINGERPRINT, False, None),
        (HALF, False, FINGERPRINT, True, "kv_dtype"),
        (HALF, True, FINGERPRINT, True, None),
        (HALF, False, HALF, True, "kv_cast"),
        (HALF, True, HALF, False, None),
        (HALF, True, dataclasses.replace(FINGERPRINT, rope="x"), False, "rope"),
        (HALF, True, dataclasses.replace(FINGERPRINT, tp_size=2), False, None),
    ],
)
def test_who_takes_whose_kv_is_up_to_the_reader(reader, reader_casts, source, source_casts, field):
    reader = dataclasses.replace(reader, kv_cast=reader_casts)
    source = dataclasses.replace(source, kv_cast=source_casts)
    for refuse in (lambda: reader.require_source(source), lambda: source.require_reader(reader)):
        if field is None:
            refuse()
            continue
        with pytest.raises(FingerprintMismatchError) as caught:
            refuse()
        assert caught.value.field == field
        assert field in caught.value.message
        assert ("--kv-cast" in caught.value.message) == (field != "rope")
    assert reader.takes(source) == (field in (None, "rope"))
    assert (reader.plan_from(source).trivial if field is None else False) == (
        reader.kv_dtype == source.kv_dtype and reader.tp_size == source.tp_size and field is None
    )


def test_an_attached_arena_is_the_same_memory():
    arena = HostArena(5, 4160)
    other = HostArena.attach(os.dup(arena.fd))
    arena.blocks[4, -1] = 200
    arena.generations[2] = 7
    assert other.blocks[4, -1] == 200
    assert other.generations[2] == 7
    with pytest.raises(ValueError, match="read-only"):
        other.blocks[0, 0] = 1
    assert (other.epoch, other.num_blocks, other.block_bytes) == (arena.epoch, 5, 4160)
    other.close()
    arena.close()
    arena.close()


def test_something_else_is_no_arena():
    fd = os.memfd_create("other")
    os.ftruncate(fd, 8192)
    with pytest.raises(ConfigError):
        HostArena.attach(fd)
    os.close(fd)


def test_touching_an_arena_leaves_it_zero():
    arena = HostArena(3, 8192)
    arena.touch()
    assert not np.any(arena.blocks)
    arena.close()
