from __future__ import annotations

import dataclasses

import pytest

from baton.errors import InvalidRequestError
from baton.types import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("n", 0),
        ("n", 1000),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {100: 1.0}),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (-1,)),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value}).validate(vocab_size=100, prefix="sampling.")
    assert caught.value.field == f"sampling.{field}"


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(max_tokens=3, min_tokens=4).validate()
    assert caught.value.field == "min_tokens"


def test_defaults_and_edges_are_valid():
    SamplingParams().validate(vocab_size=1)
    SamplingParams(
        max_tokens=1, top_p=1.0, top_k=-1, seed=2**64 - 1, logprobs=20, logit_bias={99: -100.0}, stop_token_ids=(0, 99)
    ).validate(vocab_size=100)


def test_a_copy_has_every_field_and_replace_changes_any():
    fields = dataclasses.fields(SamplingParams)
    given = SamplingParams(**{item.name: f"the {item.name}" for item in fields})
    assert given.copy() == given
    assert given.copy() is not given
    for item in fields:
        assert given.replace(**{item.name: 1}) == dataclasses.replace(given, **{item.name: 1})
    with pytest.raises(TypeError):
        given.replace(no_field=1)
