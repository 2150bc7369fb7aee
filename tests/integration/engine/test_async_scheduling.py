"""Steps launched ahead over a real model, as on a GPU: its operators in Triton's interpreter, captured steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.equality import hf_greedy, mixed_prompts
from tests.support.models.checkpoints import make_checkpoint

from baton.config import EngineConfig
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest
from baton.types import FinishReason, RequestId, SamplingParams

VOCAB, NEW_TOKENS = 512, 5
ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@dataclass
class Answer:
    """What one sequence was given."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None


def answers(llm: LLM, jobs: list[tuple[list[int], SamplingParams]], aborted: str = "") -> dict[str, Answer]:
    """Run requests, named by their number; one is aborted after two tokens."""
    core, found = llm.core, dict[str, Answer]()
    for i, (prompt, sampling) in enumerate(jobs):
        core.add_request(EngineRequest(RequestId(str(i)), prompt, sampling))
    while core.has_work():
        for output in core.step():
            answer = found.setdefault(f"{output.request_id}.{output.index}", Answer())
            answer.tokens += output.token_ids
            answer.logprobs += [each.logprob for each in output.logprobs or ()]
            answer.finish = output.finish_reason
            if output.request_id == aborted and len(answer.tokens) == 2:
                assert (core.steps.in_flight is not None) == core.steps.ahead
                core.abort(RequestId(aborted))
    core.check_integrity()
    assert core.stats().blocks_active == 0
    return found


def test_tokens_are_those_of_generate_and_of_a_cpu_in_the_plain_order(tmp_path: Path) -> None:
    """Greedy and drawn rows, ends in the middle, an abort, several answers, log probabilities, cached prefixes."""
    path = make_checkpoint(tmp_path, "llama", **ONE_LAYER)
    prompts = mixed_prompts(4, VOCAB, count=3, longest=14)
    expected = hf_greedy(path, prompts, NEW_TOKENS)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    jobs = [(prompt, greedy) for prompt in prompts]
    mixed = [
        (prompts[0], greedy.replace(stop_token_ids=(expected[0][2],))),
        (prompts[1], greedy.replace(logprobs=2, max_tokens=3)),
        (prompts[2], greedy),
        (prompts[0], SamplingParams(seed=3, max_tokens=3, n=2, top_p=0.9)),
    ]
    found = []
    for device, way in (("interpret", "auto"), ("cpu", "off")):
        config = EngineConfig(
            model=str(path),
            device=device,
            dtype="float32",
            kv_blocks=24,
            block_size=8,
            max_model_len=24,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            cuda_graphs=("4",),
            async_scheduling=way,
        )
        with LLM(config) as llm:
            assert llm.core.steps.ahead == (device == "interpret")
            assert [answer.tokens for answer in answers(llm, jobs).values()] == expected
            found.append(answers(llm, mixed, aborted="2"))
            assert llm.core.stats().prefix_hit_tokens > 0
    on, off = found
    assert on.keys() == off.keys()
    for name, answer in off.items():
        assert (on[name].tokens, on[name].finish) == (answer.tokens, answer.finish)
        assert on[name].logprobs == pytest.approx(answer.logprobs, abs=1e-4)
    assert on["0.0"].tokens == expected[0][: expected[0].index(expected[0][2]) + 1]
    assert len(on["1.0"].logprobs) == 3
    assert on["2.0"].tokens == expected[2][:2]
    assert on["2.0"].finish is FinishReason.ABORT
