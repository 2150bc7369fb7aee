"""States of recurrent layers: the cache that modules see, slots, and the calls of a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from baton.engine.models.recurrent import LayerCache, StateArena, StateShape, _parts_of, step_gated_delta_rule
from baton.errors import InternalError

SHAPES = [
    (StateShape(("conv", 0), (3, 4), torch.bfloat16), StateShape(("recurrent", 0), (2, 5), torch.float32)),
    (StateShape(("conv", 0), (7,), torch.float32), StateShape(("conv", 1), (1, 3), torch.float64)),
]


@given(parts=st.lists(st.integers(1, 9), min_size=1, max_size=5), width=st.integers(2, 4))
def test_convolution_states_are_those_of_transformers(parts: list[int], width: int) -> None:
    theirs = LinearAttentionLayer()
    states: dict = {}
    for count in parts:
        inputs = torch.randn(2, 3, count)
        ours = LayerCache(states)
        got = ours.update_conv_state(inputs, 0, conv_kernel_size=width)
        assert torch.equal(got, theirs.update_conv_state(inputs, conv_kernel_size=width))
        states = ours.states
        assert torch.equal(states["conv", 0], theirs.conv_states[0])


def test_a_snapshot_restores_every_state_of_a_slot() -> None:
    arena = StateArena(SHAPES, 3, torch.device("cpu"))
    for layer, shapes in enumerate(SHAPES):
        states = {each.key: torch.randn(3, *each.shape).to(each.dtype) for each in shapes}
        arena.store(layer, torch.arange(3), states)
    kept = [arena.load(layer, torch.tensor([1])) for layer in range(2)]
    data = arena.snapshot(1)
    assert len(data) == arena.snapshot_bytes == 32 + 48 + 32 + 32
    arena.restore(2, torch.cat([data, torch.zeros(7, dtype=torch.uint8)]), 5)
    for layer, states in enumerate(kept):
        assert all(torch.equal(arena.load(layer, torch.tensor([2]))[key], state) for key, state in states.items())
    slots = np.array([2], np.int32)
    arena.check(slots, np.array([5], np.int32), np.array([6], np.int32))


def test_a_state_after_other_tokens_is_noticed() -> None:
    arena = StateArena(SHAPES, 2, torch.device("cpu"))
    slots, zero = np.array([0, 1], np.int32), np.zeros(2, np.int32)
    arena.check(slots, zero, np.array([4, 9], np.int32))
    with pytest.raises(InternalError, match=r"slot 1 has the state after 9 tokens, not 8"):
        arena.check(slots, np.array([4, 8], np.int32), np.array([5, 9], np.int32))
    arena.check(slots, np.array([4, 0], np.int32), np.array([5, 3], np.int32))  # a new sequence has none


@given(lengths=st.lists(st.integers(1, 3), min_size=1, max_size=8), data=st.data())
def test_every_token_is_in_one_call(lengths: list[int], data: st.DataObject) -> None:
    begun = np.array(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    starts = np.array([0, *np.cumsum(lengths)], np.int32)
    slots = np.array(data.draw(st.permutations(range(len(lengths)))), np.int32)
    parts = _parts_of(starts, begun, slots, torch.device("cpu"))
    assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == sum(lengths)
    assert torch.cat([torch.arange(len(lengths))[part.slots] for part in parts]).tolist() == slots.tolist()
    for part in parts:
        assert part.num_sequences == 1 or (part.begun and part.end - part.first == part.num_sequences)


@given(
    tokens=st.integers(1, 3),
    heads=st.sampled_from([(2, 2), (2, 4)]),
    normalized=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_gated_delta_rule_is_that_of_transformers(
    tokens: int, heads: tuple[int, int], normalized: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    key_heads, value_heads = heads
    query, key = torch.randn(2, 3, tokens, key_heads, 5)
    value = torch.randn(3, tokens, value_heads, 7)
    g, beta = -torch.rand(3, tokens, value_heads), torch.rand(3, tokens, value_heads)
    state = torch.randn(3, value_heads, 5, 7)
    options = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": normalized, "output_final_state": True}
    want, want_state = torch_recurrent_gated_delta_rule(query, key, value, initial_state=state.clone(), **options)
    got, got_state = step_gated_delta_rule(query, key, value, initial_state=state, **options)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_state, want_state, rtol=1e-4, atol=1e-5)
    assert got_state.data_ptr() == state.data_ptr()
