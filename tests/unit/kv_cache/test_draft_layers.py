"""A drafter's layers of the KV block: who has which of them, and what instances exchange."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.engine.runner.draft_layers import DraftLayers
from baton.engine.runner.model_runner import pool_views
from baton.errors import FingerprintMismatchError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_cache.reshard import merge_segments
from baton.rpc.convert import fingerprint_from_pb, fingerprint_to_pb
from baton_kernels.paged_attention import AttentionSpec

BLOCK = 4
SPEC = AttentionSpec(4, 2, 8, 8, 1.0)
MODEL = (LayerShape(2, 8, 8),) * 3


def fingerprint(dtype: str = "bfloat16") -> Fingerprint:
    return Fingerprint.of(model="m", model_digest="d", rope="r", layout=KVLayout(MODEL, BLOCK, dtype))


def drafting(name: str = "eagle:1", dtype: str = "bfloat16") -> Fingerprint:
    return fingerprint(dtype).with_draft(name, DraftLayers(name, SPEC, "bfloat16", 24, BLOCK).shapes, "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_blocks_have_the_same_names_with_and_without_drafts(dtype: str) -> None:
    plain, mine = fingerprint(dtype), drafting(dtype=dtype)
    assert mine.without_draft() == plain
    assert mine.content_key() == plain.content_key()
    assert mine.digest() != plain.digest()
    assert mine.block_bytes > plain.block_bytes
    assert mine.kind == plain.kind
    assert fingerprint_from_pb(fingerprint_to_pb(mine)) == mine


def test_drafters_of_one_kind_exchange_whole_blocks_and_others_the_models_layers() -> None:
    plain, mine, other = fingerprint(), drafting(), drafting("mtp")
    assert mine.plan_from(mine).trivial
    assert mine.plan_from(mine).num_layers == len(MODEL) + 3
    size = 3 * 2 * 2 * BLOCK * 8 * 2
    for reader, source in ((mine, plain), (plain, mine), (mine, other)):
        source.require_reader(reader)
        plan = reader.plan_from(source)
        assert (plan.trivial, plan.num_layers) == (False, len(MODEL))
        (copy,) = plan.copies
        assert merge_segments(copy.segments[:, :3]).tolist() == [[0, 0, size]]


def test_a_draft_hides_no_other_difference() -> None:
    wrong = Fingerprint.of(model="m", model_digest="d", rope="r", layout=KVLayout(MODEL[:2], BLOCK, "bfloat16"))
    for reader, source in ((drafting(), wrong), (wrong, drafting())):
        with pytest.raises(FingerprintMismatchError) as caught:
            reader.plan_from(source)
        assert caught.value.field == "layer_shapes"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_entries_that_do_not_belong_to_a_sequence_do_not_count(dtype: str) -> None:
    layers = DraftLayers("x", SPEC, dtype, 22, BLOCK)
    layout = KVLayout(layers.shapes, BLOCK, dtype)
    layers.bind(*pool_views(layout, torch.zeros(8 * layout.block_bytes, dtype=torch.uint8), layers.specs, [None] * 3))
    own = KVLayout(layers.shapes[:1], BLOCK, dtype)
    mine, yours = (
        pool_views(own, torch.randint(0, 99, (4 * own.block_bytes,), dtype=torch.uint8), [SPEC], [None])[0]
        for _ in range(2)
    )
    tokens, table = np.arange(100, 112, dtype=np.uint32), np.array([5, 2, 7], np.int32)
    assert layers.num_known(tokens, table) == 0
    slots = np.arange(9)
    layers.copy_from(mine, [3, 0, 1], slots, tokens, slots + 1, table)  # of positions 1 to 9
    assert layers.num_known(tokens[:10], table) == 9
    assert layers.num_known(tokens[:1], table) == 0
    assert layers.num_known(tokens[:11], table) == 0  # the last one lacks
    assert layers.num_known(tokens[:10], table[[0, 2, 1]]) == 0
    changed = tokens.copy()
    changed[3] = 1
    assert layers.num_known(changed[:10], table) == 5  # 4 is behind another token
    layers.copy_to(yours, [2, 1, 3], slots + 1, table)
    for at in slots.tolist():
        for one, two in ((mine.k, yours.k), (mine.v, yours.v)):
            a = one[[3, 0, 1][at // BLOCK], :, at % BLOCK]
            assert torch.equal(a, two[[2, 1, 3][at // BLOCK], :, at % BLOCK])
    state = torch.randn(22).to(getattr(torch, dtype))
    assert layers.state_of(tokens, 6, table) is None
    layers.keep_state(tokens, 6, table, state)
    found = layers.state_of(tokens, 6, table)
    assert found is not None
    assert torch.equal(found, state)
    assert layers.state_of(tokens, 7, table) is layers.state_of(changed[::-1].copy(), 6, table) is None
    layers.keep_state(tokens, 7, table, state + 1)
    assert layers.state_of(tokens, 6, table) is None
    assert layers.state_of(tokens, 7, table) is not None
