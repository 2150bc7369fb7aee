"""Layers with a sliding window give back the blocks that no later token sees; nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.equality import References, mixed_prompts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.preemption import expect_short_outputs

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest
from baton.types import RequestId, SamplingParams

VOCAB, BLOCK, NEW_TOKENS = 512, 16, 48
SAMPLING = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


def engine_config(path: Path, **changes: Any) -> EngineConfig:
    values = {"dtype": "float32", "kv_blocks": 24, "max_model_len": 24 * BLOCK, "prefill_chunk": 64, **changes}
    return EngineConfig(model=str(path), **values)


def tokens_of(llm: LLM, prompts: list[list[int]], sampling: SamplingParams = SAMPLING) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, sampling)]


@pytest.mark.usefixtures("warm_followers")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma3", {}),
        ("gemma3", {"attention_backend": "torch"}),
        ("gemma3", {"prefix_caching": False}),
        ("gemma3", {"tp": 2}),
        ("gemma2", {"block_size": 8, "kv_blocks": 48}),
        ("gpt_oss", {"async_scheduling": "on"}),
        ("cohere2", {}),
    ],
    ids=str,
)
def test_equality_with_preemption_and_prefix_hits(references: References, name: str, changes: dict[str, Any]) -> None:
    prompts = mixed_prompts(5, VOCAB, count=20, longest=250)
    expected = references.greedy(name, prompts, NEW_TOKENS)
    with LLM(engine_config(references.checkpoint(name), **changes)) as llm:
        assert llm.core.executor.layout.num_groups >= 2
        expect_short_outputs(llm.core)
        for _ in range(2):
            assert tokens_of(llm, prompts) == expected
        stats = llm.core.stats()
        assert stats.num_preemptions > 0
        assert stats.num_blocks == llm.core.executor.config.kv_blocks
        llm.core.check_integrity()


def test_hits_need_the_tail_of_the_windows_and_other_continuations_are_right(references: References) -> None:
    """What was given back stays findable until its memory is used: a conversation's next turn, and its beginning."""
    path = references.checkpoint("gemma3")
    (prompt,) = mixed_prompts(9, VOCAB, count=1, longest=200)
    prompt = (prompt * 200)[:200]
    (answer,) = references.greedy("gemma3", [prompt], NEW_TOKENS)
    turns = [prompt + answer + [9, 8, 10], [*prompt[:96], 11, 12], prompt]
    expected = references.greedy("gemma3", turns, NEW_TOKENS)
    with LLM(engine_config(path, kv_blocks=80)) as llm:
        assert tokens_of(llm, [prompt]) == [answer]
        before = 0
        for turn, want in zip(turns, expected, strict=True):
            assert tokens_of(llm, [turn]) == [want]
            hits = llm.core.stats().prefix_hit_tokens
            assert hits - before >= (len(turn) - 1) // BLOCK * BLOCK - 2 * BLOCK
            before = hits
        llm.core.check_integrity()


@pytest.mark.parametrize("count", [1, 9, 30])
def test_roll_back_beyond_what_the_window_still_has(references: References, count: int) -> None:
    path = references.checkpoint("gemma3")
    prompt = mixed_prompts(6, VOCAB, count=4, longest=70)[0]
    (want,) = references.greedy("gemma3", [prompt], NEW_TOKENS)
    with LLM(engine_config(path)) as llm:
        core = llm.core
        core.add_request(EngineRequest(RequestId("a"), prompt, SAMPLING))
        got: list[int] = []
        while len(got) < 35:
            got += [token for output in core.step() for token in output.token_ids]
        core.roll_back(RequestId("a"), count)
        del got[len(got) - count :]
        while core.has_work():
            got += [token for output in core.step() for token in output.token_ids]
        assert got == want
        core.check_integrity()


def run_until(core: EngineCore, prompt: list[int], tokens: int) -> tuple[list[int], int]:
    """Generate some tokens; returns them and the blocks in use then, in blocks of all layers."""
    request = EngineRequest(RequestId("long"), prompt, SamplingParams(temperature=0.0, max_tokens=64))
    core.add_request(request)
    found: list[int] = []
    while len(found) < tokens:
        found += [token for output in core.step() for token in output.token_ids]
    active = core.stats().blocks_active
    core.abort(RequestId("long"))
    core.step()
    core.check_integrity()
    return found, active


def test_gemma_3_shaped_at_8k_uses_less_than_half(tmp_path: Path) -> None:
    """Five windows of 1024 to one layer of full attention, as Gemma 3 has them."""
    layers = 12
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)]
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    path = make_checkpoint(
        tmp_path, "gemma3", num_hidden_layers=layers, layer_types=kinds, sliding_window=1024,
        max_position_embeddings=16384, **sizes,
    )  # fmt: skip
    prompt = [8 + (7 * i * i + 3 * i) % 500 for i in range(8192)]
    found = []
    for layer_groups in (False, True):
        config = engine_config(path, kv_blocks=600, max_model_len=9000, prefill_chunk=1024, layer_groups=layer_groups)
        with LLM(config) as llm:
            found.append(run_until(llm.core, prompt, 4))
    (today, all_layers), (grouped, groups) = found
    assert grouped == today
    assert all_layers == 8192 // BLOCK + 1
    assert groups <= 0.4 * all_layers
