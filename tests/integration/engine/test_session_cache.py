"""Conversations that take turns in an engine whose pool cannot hold them all."""

from __future__ import annotations

from tests.support.equality import References

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest
from baton.types import RequestId, SamplingParams

NUM_SESSIONS = 9
NUM_KEPT = 6
BLOCKS = 6
BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


def run_rounds(core: EngineCore, rounds: int, *, named: bool) -> tuple[list[list[int]], int]:
    """Let every conversation ask its question in turn; return all answers, and the last round's tokens from cache."""
    prompts = [[3 + (7 * i + j) % 200 for j in range(BLOCKS * BLOCK_SIZE - 2)] for i in range(NUM_SESSIONS)]
    answers: list[list[int]] = []
    before = 0
    core._pool._cached._clock = lambda: float(len(answers))  # a second per request, however busy the machine is
    for number in range(rounds):
        before = core.stats().prefix_hit_tokens
        for i, prompt in enumerate(prompts):
            key = f"session {i}".encode() if named else b""
            core.add_request(EngineRequest(RequestId(f"{number}.{i}"), prompt, GREEDY, session_key=key))
            answers.append([])
            while core.has_work():
                for output in core.step():
                    answers[-1] += output.token_ids
    core.check_integrity()
    return answers, core.stats().prefix_hit_tokens - before


def test_regular_conversations_keep_their_kv_over_gaps_in_which_lru_drops_it(references: References) -> None:
    config = EngineConfig(
        model=str(references.checkpoint("llama")), dtype="float32", block_size=BLOCK_SIZE, kv_blocks=NUM_KEPT * BLOCKS
    )
    with LLM(config) as llm:
        plain, hits = run_rounds(llm.core, 3, named=False)
        assert hits == 0  # each is dropped just before it comes back
    with LLM(config) as llm:
        answers, hits = run_rounds(llm.core, 16, named=True)
        assert hits >= (NUM_KEPT - 2) * (BLOCKS - 1) * BLOCK_SIZE
    assert answers == plain[:NUM_SESSIONS] * 16
