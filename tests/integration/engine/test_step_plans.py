"""Several query tokens of a decoding sequence, and roll-backs, over real checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.equality import References, mixed_prompts
from tests.support.models.step_plans import feed_drafts, kv_of
from transformers import AutoModelForCausalLM

from baton.config import EngineConfig
from baton.engine.build import make_arena
from baton.engine.executor.base import load_executor
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest
from baton.engine.runner.input_batch import ForwardBatch
from baton.types import RequestId, SamplingParams

NEW_TOKENS = 24


def config(references: References, architecture: str, **options: object) -> EngineConfig:
    values = {"dtype": "float32", "kv_blocks": 64, **options}
    return EngineConfig(model=str(references.checkpoint(architecture)), **values)


def without_end(tokens: list[int]) -> list[int]:
    assert len(tokens) >= 12
    return tokens[:12]


@pytest.mark.parametrize("widths", [[5, 1, 6], [12]], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_known_tokens_several_at_a_time_give_the_same_kv_and_logits(
    references: References, architecture: str, widths: list[int]
) -> None:
    prompt = mixed_prompts(6, 512, count=12, longest=70)[3]
    known = without_end(references.greedy(architecture, [prompt], NEW_TOKENS)[0])
    length = len(prompt) + len(known) - 1
    logits, kv = [], []
    for steps in ([1] * len(known), widths):
        with LLM(config(references, architecture)) as llm:
            logits.append(feed_drafts(llm.core, prompt, known, steps))
            kv.append(kv_of(llm.core, "known", length).view(np.float32))
    want, got = logits
    assert want[:-1].argmax(-1).tolist() == got[:-1].argmax(-1).tolist() == known[1:]
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    assert np.abs(kv[1] - kv[0]).max() <= 1e-4 * np.abs(kv[0]).max()
    assert kv[0].any()


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_roll_backs_leave_greedy_tokens_as_they_are(references: References, architecture: str) -> None:
    prompts = mixed_prompts(6, 512, count=4, longest=70)
    expected = references.greedy(architecture, prompts, NEW_TOKENS)
    rng = np.random.default_rng(0)
    with LLM(config(references, architecture)) as llm:
        core = llm.core
        tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(len(prompts))}
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
            core.add_request(EngineRequest(RequestId(f"r{i}"), prompt, params))
        for step in range(400):
            for output in core.step():
                tokens[output.request_id] += output.token_ids
            name = f"r{rng.integers(len(prompts))}"
            if step < 60 and RequestId(name) in core._groups and tokens[name]:
                count = int(rng.integers(0, len(tokens[name]) + 1)) if step % 7 == 0 else 0
                core.roll_back(RequestId(name), count)
                del tokens[name][len(tokens[name]) - count :]
            if not core.has_work():
                break
        assert list(tokens.values()) == expected
        core.check_integrity()


@pytest.mark.parametrize(("packed", "tp"), [(True, 1), (False, 1), (True, 2)])
def test_hidden_states_are_what_the_head_takes(references: References, packed: bool, tp: int) -> None:
    values = config(references, "llama", packed_linears=packed, tp=tp)
    executor = load_executor(values)
    try:
        shards = make_arena(values, executor)
        batch = ForwardBatch(
            token_ids=np.arange(20, 40),
            positions=np.arange(20),
            query_starts=np.array([0, 20], np.int32),
            context_lens=np.array([20], np.int32),
            block_tables=np.array([[3, 1]], np.int32),
            logit_rows=np.array([4, 19]),
            hidden_of=(2, -1, 0),
        )
        output = executor.forward(batch)
        inner, last, first = output.hidden
        model = executor.model.module  # type: ignore[attr-defined]
        with torch.inference_mode():
            again = last[[4, 19]].float() @ model.get_output_embeddings().weight.float().T
            if tp == 1:
                ids = torch.from_numpy(batch.token_ids)
                assert torch.equal(first, model.get_input_embeddings()(ids))
                whole = AutoModelForCausalLM.from_pretrained(values.model, dtype=torch.float32)
                found = whole(ids[None], output_hidden_states=True).hidden_states[2][0]
                assert (inner - found).abs().max() <= 1e-4 * found.abs().max()
        assert (again - output.logits).abs().max() <= 1e-5 * output.logits.abs().max()
        shards.close()
    finally:
        executor.close()
