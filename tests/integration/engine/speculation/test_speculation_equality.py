"""Speculative decoding over real checkpoints: the tokens of the engine without it, and greedy those of ``generate``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.equality import ARCHITECTURES, References, mixed_prompts
from tests.support.models.draft_heads import write_eagle, write_medusa
from tests.support.models.drafters import RecordedDrafter

from baton.config import EngineConfig
from baton.engine.llm import LLM, RequestOutput
from baton.engine.speculation.methods import load_drafter
from baton.engine.speculation.speculator import Speculator
from baton.errors import ConfigError
from baton.grammar import regex_grammar
from baton.types import SamplingParams

VOCAB = 512
NEW_TOKENS = 16
METHODS = ("ngram", "suffix", "draft", "eagle", "eagle3", "medusa")
EIGHTEEN = (
    *ARCHITECTURES,
    *("qwen2", "qwen3_moe", "gemma", "gemma2", "deepseek_v2", "phi3"),
    *("olmo2", "glm4", "granite", "cohere2", "starcoder2"),
)
"""Each is run with recorded drafts and with one of the methods in turn, so that every method meets three of them."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
SAMPLINGS = [
    GREEDY,
    SamplingParams(seed=1, temperature=0.7, max_tokens=NEW_TOKENS, logprobs=2),
    SamplingParams(seed=2, temperature=1.3, top_p=0.9, max_tokens=NEW_TOKENS),
    SamplingParams(seed=3, temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=NEW_TOKENS),
    SamplingParams(seed=4, temperature=0.7, n=4, max_tokens=NEW_TOKENS, min_tokens=3),
    GREEDY.replace(logprobs=1, min_tokens=6, stop_token_ids=(11, 12, 13)),
    SamplingParams(seed=5, temperature=1.0, max_tokens=NEW_TOKENS, grammar=regex_grammar("([a-m]{2,9}[ ,]){3,9}")),
]


def config(references: References, architecture: str, **options: object) -> EngineConfig:
    values = {"dtype": "float32", "kv_blocks": 192, "max_num_batched_tokens": 256, "prefill_chunk": 64, **options}
    return EngineConfig(model=str(references.checkpoint(architecture)), **values)


def prompts() -> list[list[int]]:
    """Return a prompt for each way of sampling; each repeats itself, so that something can be looked up."""
    return [(prompt * 3)[:150] for prompt in mixed_prompts(7, VOCAB, count=len(SAMPLINGS), longest=70)]


def check_same(outputs: list[RequestOutput], plain: list[RequestOutput]) -> None:
    """Compare all that answers say: tokens, reasons, and log probabilities as far as float32 tells them apart."""
    for output, other in zip(outputs, plain, strict=True):
        for one, two in zip(output.outputs, other.outputs, strict=True):
            assert one.token_ids == two.token_ids
            assert (one.finish_reason, one.stop_reason) == (two.finish_reason, two.stop_reason)
            assert (one.logprobs is None) == (two.logprobs is None)
            for mine, theirs in zip(one.logprobs or (), two.logprobs or (), strict=True):
                assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def drafting(references: References, folder: Path, method: str, architecture: str) -> dict[str, object]:
    """Return the options of a method, for whose head or model files are written if it needs some."""
    target = references.checkpoint(architecture)
    options: dict[str, object] = {"speculative": method, "speculative_tokens": 4}
    if method == "draft":
        return {**options, "speculative_model": str(target)}
    if method == "medusa":
        return {**options, "speculative_model": str(write_medusa(folder, target))}
    if method.startswith("eagle"):
        return {**options, "speculative_model": str(write_eagle(folder, target, third=method == "eagle3"))}
    return options


@pytest.mark.parametrize(("at", "architecture"), list(enumerate(EIGHTEEN)), ids=EIGHTEEN)
def test_answers_are_those_without_speculation(
    references: References, tmp_path: Path, at: int, architecture: str
) -> None:
    expected = references.greedy(architecture, prompts()[:1], NEW_TOKENS)
    with LLM(config(references, architecture)) as llm:
        plain = llm.generate(prompts(), SAMPLINGS)
        assert plain[0].token_ids == expected[0]
        # A drafter that is right more often than not, in a pool that is preempted.
        known = {
            (f"llm-{len(SAMPLINGS) + i}", sequence.index): sequence.token_ids
            for i, output in enumerate(plain)
            for sequence in output.outputs
        }
        drafter = RecordedDrafter(known, probability=0.7, vocab_size=VOCAB)
        own = dataclasses.replace(llm.config, speculative="ngram", speculative_tokens=5)
        llm.core.speculator = Speculator(own, drafter, VOCAB)
        check_same(llm.generate(prompts(), SAMPLINGS), plain)
        stats = llm.core.speculator.stats
        assert 0.4 < stats.accepted[0] / stats.drafted[0] < 0.95
        llm.core.check_integrity()
        assert llm.core.stats().blocks_active == 0
    options = drafting(references, tmp_path / "head", METHODS[at % len(METHODS)], architecture)
    with LLM(config(references, architecture, **options)) as llm:
        check_same(llm.generate(prompts(), SAMPLINGS), plain)
        assert llm.core.speculator is not None
        stats = llm.core.speculator.stats
        assert not stats.faults
        if options["speculative"] == "draft":  # by itself
            assert stats.accepted.total() > 0.9 * stats.drafted.total() > NEW_TOKENS
        elif "speculative_model" in options:
            assert stats.drafted.total() > NEW_TOKENS


def test_what_was_answered_before_is_drafted(references: References) -> None:
    with LLM(config(references, "llama")) as llm:
        plain = llm.generate(prompts(), SAMPLINGS)
    with LLM(config(references, "llama", speculative="suffix", speculative_tokens=5)) as llm:
        assert llm.core.speculator is not None
        for least in (0, NEW_TOKENS):
            first = llm.core.speculator.stats.accepted.total()
            check_same(llm.generate(prompts(), SAMPLINGS), plain)
            assert llm.core.speculator.stats.accepted.total() - first >= least


@pytest.mark.parametrize("shape", [{"tp": 2}, {"pp": 2}], ids=str)
def test_answers_are_those_without_speculation_on_two_ranks(references: References, shape: dict[str, int]) -> None:
    with LLM(config(references, "llama")) as llm:
        plain = llm.generate(prompts(), SAMPLINGS)
    with LLM(config(references, "llama", speculative="suffix", speculative_tokens=4, **shape)) as llm:
        check_same(llm.generate(prompts(), SAMPLINGS), plain)
        check_same(llm.generate(prompts(), SAMPLINGS), plain)
        assert llm.core.speculator is not None
        assert llm.core.speculator.stats.accepted.total() > 0


def test_the_length_by_measured_times_changes_no_token(references: References) -> None:
    with LLM(config(references, "qwen3")) as llm:
        plain = llm.generate(prompts(), SAMPLINGS)
    with LLM(config(references, "qwen3", speculative="suffix")) as llm:
        check_same(llm.generate(prompts(), SAMPLINGS), plain)
        check_same(llm.generate(prompts(), SAMPLINGS), plain)


DEMO = Path(__file__).resolve().parents[4] / "models" / "baton-tiny"


def demo(**options: object) -> EngineConfig:
    values = {"dtype": "float32", "kv_blocks": 192, "speculative": "draft", "speculative_model": str(DEMO), **options}
    return EngineConfig(model=str(DEMO), **values)


def test_a_model_that_drafts_for_itself_is_right(references: References) -> None:
    """It has the target's parameters and random numbers, so it draws the same tokens."""
    samplings = [sampling.replace(min_tokens=0, stop_token_ids=()) for sampling in SAMPLINGS]
    with LLM(demo(speculative="none", speculative_model="")) as llm:
        plain = llm.generate(prompts(), samplings)
    with LLM(demo(speculative_tokens=4)) as llm:
        check_same(llm.generate(prompts(), samplings), plain)
        assert llm.core.speculator is not None
        stats = llm.core.speculator.stats
        assert not stats.faults
        assert stats.drafted.total() > 100
        assert stats.accepted.total() > 0.98 * stats.drafted.total()


def test_a_draft_model_that_does_not_fit_is_refused(references: References) -> None:
    for options in (
        {"speculative_model": ""},
        {"speculative_model": "/nowhere"},
        {"speculative_model": str(references.checkpoint("llama"))},  # another tokenizer: none
        {"device": "meta"},
    ):
        config = demo(**options)
        with pytest.raises(ConfigError) as caught:
            load_drafter(config, SimpleNamespace(vocab_size=4096))  # type: ignore[arg-type]
        assert caught.value.field in {"speculative_model", "speculative"}
    with pytest.raises(ConfigError) as caught:
        load_drafter(demo(), SimpleNamespace(vocab_size=4095))  # type: ignore[arg-type]
    assert (caught.value.field, "4095" in caught.value.message) == ("speculative_model", True)
    with pytest.raises(ConfigError) as caught:
        demo(speculative="ngram")
    assert caught.value.field == "speculative_model"
