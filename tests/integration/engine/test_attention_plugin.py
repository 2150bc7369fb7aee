"""Attention backends of another package: found by entry point in every rank, used if the self-check agrees."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.support.equality import References, mixed_prompts

from baton.config import EngineConfig
from baton.engine.llm import LLM
from baton.errors import ConfigError
from baton.types import SamplingParams

ROOT = Path(__file__).parents[3]
NEW_TOKENS = 12


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata that an installer writes, here and in child processes."""
    info = tmp_path / "baton_gather-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: baton-gather\nVersion: 0.1.0\n")
    lines = [f"{name} = tests.support.models.gather_attention:make_{name}" for name in ("gather", "farsighted")]
    (info / "entry_points.txt").write_text("\n".join(["[baton.attention_backends]", *lines, "gone = no_module:x"]))
    monkeypatch.syspath_prepend(str(tmp_path))
    inherited = [entry for entry in sys.path if entry] + [os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), *inherited]))


def config(references: References, **options: object) -> EngineConfig:
    values = {"model": str(references.checkpoint("llama")), "dtype": "float32", "kv_blocks": 256, **options}
    return EngineConfig(**values)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("tp", [1, 2])
def test_equality_with_a_backend_registered_from_outside(references: References, tp: int) -> None:
    prompts = mixed_prompts(5, 512, count=10, longest=150)
    expected = references.greedy("llama", prompts, NEW_TOKENS)
    with LLM(config(references, attention_backend="gather", tp=tp, prefill_chunk=64)) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
        assert [output.token_ids for output in outputs] == expected
        assert llm.core.executor.attention_backend == "gather"
        assert "attention gather" in llm.core.executor.description
        llm.core.check_integrity()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("farsighted", "attention farsighted, relative error"),
        ("gone", "'gone' cannot be imported"),
        ("none", "'none' is not known .there are: auto, cpp, farsighted, flashinfer, gather, gone, torch"),
    ],
)
def test_a_backend_that_is_wrong_or_not_there_is_refused_by_name(references: References, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        LLM(config(references, attention_backend=name))
    assert caught.value.field == "attention_backend"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"executor": "ray"}, "'ray' is not known .there are: auto, in_process, multiprocess"),
        ({"executor": "in_process", "tp": 2}, "need multiprocess"),
        ({"executor": "multiprocess"}, "needs tp or pp above 1"),
    ],
)
def test_an_executor_that_is_not_there_or_does_not_fit_is_refused(
    references: References, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        LLM(config(references, **options))
    assert caught.value.field == "executor"


@pytest.mark.usefixtures("installed")
def test_a_backend_that_reads_no_int8_is_refused_by_name(references: References) -> None:
    with pytest.raises(ConfigError, match="attention_backend gather does not read KV of int8") as refused:
        LLM(config(references, attention_backend="gather", kv_dtype="int8"))
    assert refused.value.field == "kv_dtype"
