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
from baton.kv_cache.layout import DTYPE_BYTES, KVLayout, LayerShape, is_quantized, layer_types, type_name

shapes = st.builds(LayerShape, st.integers(1, 8), st.integers(1, 96), st.integers(1, 96))


@given(
    layers=st.lists(shapes, min_size=1, max_size=6),
    block_size=st.integers(1, 32),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "fp8_e4m3"]),
)
def test_layers_lie_behind_one_another_without_overlap(layers, block_size, dtype):
    layout = KVLayout(tuple(layers), block_size, dtype)
    at = 0
    for i, layer in enumerate(layers):
        place, tokens, unit = layout.places[i], layer.kv_heads * block_size, DTYPE_BYTES[dtype]
        assert at <= place.k < at + 2  # scales are aligned
        assert place.v == place.k + tokens * layer.k_dim * unit
        at = place.v + tokens * layer.v_dim * unit
        if dtype == "int8":
            assert (place.k_scales, place.v_scales) == (at + at % 2, at + at % 2 + 2 * tokens)
            at = place.v_scales + 2 * tokens
        else:
            assert (place.k_scales, place.v_scales) == (-1, -1)
        assert place.end == at
    assert at <= layout.block_bytes < at + 64
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


@pytest.mark.parametrize(("heads", "dim", "share"), [(8, 128, 0.508), (2, 32, 0.532)])
def test_int8_has_about_half_of_bfloat16s_bytes(heads, dim, share):
    half, whole = (KVLayout((LayerShape(heads, dim, dim),) * 6, 16, kind) for kind in ("int8", "bfloat16"))
    assert half.block_bytes / whole.block_bytes == pytest.approx(share, abs=0.001)
    assert half.bytes_per_token * 16 == half.block_bytes


NAMES = ["bfloat16", "int8", "fp8_e4m3", "int8;bfloat16@0,5", "fp8_e4m3;float32@2"]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_type_says_what_each_layer_is(name):
    types = layer_types(name, 6)
    assert type_name(types) == name
    for first in range(6):
        assert type_name(types[first:]) == type_name(layer_types(type_name(types[first:]), 6 - first))
    assert is_quantized(name) == (name != "bfloat16")


@given(st.text(alphabet="int8;@,0123bfloat16x", max_size=24))
def test_any_other_name_is_refused(name):
    try:
        assert type_name(layer_types(name, 4)) == name
    except ConfigError as error:
        assert error.field == "kv_dtype"  # noqa: PT017


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


def of_type(kv_dtype, **changes):
    layout = KVLayout((LayerShape(2, 8, 8),) * 2, 16, kv_dtype)
    made = Fingerprint.of(model="m", model_digest="d", rope="r", layout=layout)
    return dataclasses.replace(made, **changes)


def test_kv_of_8_bits_is_converted_where_its_scales_are_in_the_block():
    int8, half, fp8 = of_type("int8"), of_type("bfloat16"), of_type("fp8_e4m3", kv_scales="s")
    assert int8.layout != half.layout == fp8.layout
    for mine, theirs in ((int8, half), (half, int8), (of_type("int8;bfloat16@0"), int8)):
        with pytest.raises(FingerprintMismatchError, match="--kv-cast"):
            mine.require_source(theirs)
        assert not mine.takes(theirs)
        casting = dataclasses.replace(mine, kv_cast=True)
        casting.require_source(theirs)
        theirs.require_reader(casting)
        assert casting.takes(theirs)
        assert not casting.plan_from(theirs).trivial
    for mine, theirs in ((fp8, half), (half, fp8)):
        casting = dataclasses.replace(mine, kv_cast=True)
        assert not casting.takes(theirs)
        for refuse in (
            lambda a=casting, b=theirs: a.require_source(b),
            lambda a=casting, b=theirs: b.require_reader(a),
        ):
            with pytest.raises(FingerprintMismatchError, match="not converted") as caught:
                refuse()
            assert caught.value.field == "kv_dtype"
    with pytest.raises(FingerprintMismatchError) as caught:
        fp8.require_source(of_type("fp8_e4m3", kv_scales="others"))
    assert caught.value.field == "kv_scales"
    with pytest.raises(FingerprintMismatchError) as caught:
        dataclasses.replace(half, kv_cast=True).require_source(dataclasses.replace(int8, layout="later"))
    assert caught.value.field == "layout"
    assert len({x.content_key() for x in (int8, half, fp8, of_type("int8;bfloat16@0"))}) == 4


def test_what_tiers_keep_in_another_type_says_that_it_was_converted():
    mine = of_type("bfloat16", tp_size=2, kv_cast=True)
    kept = mine.kept_as("int8")
    assert kept == dataclasses.replace(of_type("int8"), kv_cast=True)
    mine.require_source(kept)
    kept.require_source(mine)
    assert mine.kept_as("auto") == mine.kept_as("bfloat16") == mine.undivided()
    for other, kind in ((of_type("bfloat16"), "int8"), (of_type("fp8_e4m3", kv_cast=True), "int8")):
        with pytest.raises(ConfigError) as caught:
            other.kept_as(kind)
        assert caught.value.field == "kv_tier_dtype"


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
