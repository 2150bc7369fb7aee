"""One engine alone: greedy output in float32 equals Hugging Face ``generate``, token for token."""

from __future__ import annotations

import pytest
from tests.support.equality import ARCHITECTURES, References, mixed_prompts
from tests.support.preemption import expect_short_outputs

from baton.config import EngineConfig
from baton.engine.llm import LLM, RequestOutput
from baton.errors import ConfigError
from baton.types import FinishReason, SamplingParams

VOCAB = 512
NEW_TOKENS = 12
LONG_NEW_TOKENS = 48
END_TOKEN = 2


def make_llm(references: References, architecture: str, **options: object) -> LLM:
    values = {
        "model": str(references.checkpoint(architecture)),
        "dtype": "float32",
        "kv_blocks": 512,
        "max_num_seqs": 32,
        "prefill_chunk": 64,
        "max_num_batched_tokens": 512,
        **options,
    }
    return LLM(EngineConfig(**values))


def check(outputs: list[RequestOutput], expected: list[list[int]], max_tokens: int) -> None:
    for i, (output, reference) in enumerate(zip(outputs, expected, strict=True)):
        assert output.token_ids == reference, f"prompt {i} of {len(output.prompt_token_ids)} tokens"
        ended = reference[-1] == END_TOKEN
        assert output.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or len(reference) == max_tokens


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equality_of_32_concurrent_requests(references: References, architecture: str, backend: str) -> None:
    prompts = mixed_prompts(1, VOCAB)
    try:
        llm = make_llm(references, architecture, attention_backend=backend)
    except ConfigError as error:
        if backend == "cpp" and error.field == "attention_backend":
            pytest.skip(error.message)
        raise
    expected = references.greedy(architecture, prompts, NEW_TOKENS)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    check(llm.generate(prompts, sampling), expected, NEW_TOKENS)
    assert llm.core.executor.attention_backend.startswith(backend)
    first = llm.core.stats()
    assert first.prefix_hit_tokens > 0
    # Again, mostly from the prefix cache now.
    check(llm.generate(prompts, sampling), expected, NEW_TOKENS)
    second = llm.core.stats()
    assert second.prefix_hit_tokens - first.prefix_hit_tokens > 0.8 * sum(map(len, prompts))
    llm.core.check_integrity()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equality_with_a_pool_so_small_that_preemption_happens(references: References, architecture: str) -> None:
    prompts = mixed_prompts(2, VOCAB, count=14, longest=260)
    expected = references.greedy(architecture, prompts, LONG_NEW_TOKENS)
    llm = make_llm(references, architecture, kv_blocks=24, max_model_len=24 * 16)
    expect_short_outputs(llm.core)
    check(llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=LONG_NEW_TOKENS)), expected, LONG_NEW_TOKENS)
    assert llm.core.stats().num_preemptions > 0
    llm.core.check_integrity()


def test_equality_with_repetition_penalty(references: References) -> None:
    prompts = mixed_prompts(3, VOCAB, count=12, longest=120)
    expected = references.greedy("llama", prompts, NEW_TOKENS, repetition_penalty=1.7)
    assert expected != references.greedy("llama", prompts, NEW_TOKENS)
    llm = make_llm(references, "llama")
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, repetition_penalty=1.7)
    check(llm.generate(prompts, sampling), expected, NEW_TOKENS)


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_equality_does_not_depend_on_chunks_blocks_and_caching(references: References, chunk: int) -> None:
    prompts = mixed_prompts(4, VOCAB, count=10, longest=150)
    expected = references.greedy("mistral", prompts, NEW_TOKENS)
    llm = make_llm(references, "mistral", prefill_chunk=chunk, block_size=8, prefix_caching=chunk == 7)
    check(llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)), expected, NEW_TOKENS)
