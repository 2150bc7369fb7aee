"""Sampling parameters over the wire and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.v1 import common_pb2
from baton.rpc.convert import sampling_from_pb, sampling_to_pb
from baton.types import Grammar, SamplingParams

FEW: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.none() | st.integers(1, 2**31),
    "min_tokens": st.sampled_from([0, 1, 300]),
    "temperature": st.sampled_from([0, 0.7, 1.0]),
    "top_p": st.sampled_from([0.1, 1.0]),
    "top_k": st.sampled_from([-1, 0, 1, 300]),
    "min_p": st.sampled_from([0.0, 0.05]),
    "repetition_penalty": st.sampled_from([1.0, 1.1]),
    "presence_penalty": st.sampled_from([-2.0, 0.0, 0.5]),
    "frequency_penalty": st.sampled_from([-2.0, 0.0, 0.5]),
    "logit_bias": st.dictionaries(st.integers(0, 2**31), st.sampled_from([-100.0, 1.5]), max_size=1),
    "seed": st.none() | st.integers(0, 2**64 - 1),
    "stop": st.sampled_from([(), ("end",)]),
    "stop_token_ids": st.lists(st.integers(0, 2**31), max_size=2).map(tuple),
    "ignore_eos": st.booleans(),
    "logprobs": st.none() | st.integers(0, 20),
    "prompt_logprobs": st.none() | st.integers(0, 20),
    "speculative_tokens": st.none() | st.integers(0, 16),
    "n": st.integers(1, 128),
    "grammar": st.none() | st.builds(Grammar, st.just("regex"), st.just("start: /a/"), st.sampled_from([(), (7, 8)])),
}


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional=FEW))
def test_parameters_come_back_as_they_were(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    message = common_pb2.SamplingParams.FromString(sampling_to_pb(params).SerializeToString())
    assert sampling_from_pb(message, stop=params.stop) == params


def test_every_field_is_drawn() -> None:
    assert FEW.keys() == {field.name for field in fields(SamplingParams)}
