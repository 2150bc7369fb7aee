"""Names under which a model is served."""

from __future__ import annotations

import pytest

from baton.config import EngineConfig
from baton.errors import ConfigError

SNAPSHOT = "/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca"


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen3-0.6B", "Qwen/Qwen3-0.6B")),
        ("gpt2", ("gpt2",)),
        ("models/my-qwen3/", ("my-qwen3", "models/my-qwen3")),
        ("/models/a.gguf", ("a", "/models/a.gguf")),
        (SNAPSHOT, ("Qwen3-0.6B", "Qwen/Qwen3-0.6B", SNAPSHOT)),
    ],
)
def test_the_last_part_the_whole_and_the_hubs_name(model: str, names: tuple[str, ...]) -> None:
    config = EngineConfig(model=model)
    assert config.model_names == names
    assert config.model_name == names[0]


def test_given_names_are_the_only_ones() -> None:
    config = EngineConfig(model="org/model", served_model_name="first, second/b,first")
    assert config.model_names == ("first", "second/b")
    assert config.model_name == "first"


@pytest.mark.parametrize("given", [",", "a,,b", " "])
def test_a_name_is_not_empty(given: str) -> None:
    with pytest.raises(ConfigError, match="served_model_name must be names separated by commas") as error:
        EngineConfig(served_model_name=given)
    assert error.value.field == "served_model_name"
