"""Models with recurrent layers: states in slots, snapshots in the prefix cache, and what is refused.

The tokens are those of ``generate`` (tests/integration/test_architectures.py has every type; here are one of each kind
of state: gated delta rule beside attention, Mamba that goes on one token at a time, convolutions, no attention at all).
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.models.recurrent_checkpoint import NEW_TOKENS, RecurrentCheckpoint
from tests.support.models.recurrent_checkpoint import random_tokens as tokens

from baton.engine.core import EngineCore
from baton.engine.executor.base import load_executor
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest
from baton.errors import ConfigError
from baton.types import RequestId, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = ("qwen3_next", "jamba", "lfm2", "mamba2")
BLOCK = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecurrentCheckpoint]:
    return {kind: RecurrentCheckpoint(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(params=KINDS)
def checkpoint(request: pytest.FixtureRequest, checkpoints: dict[str, RecurrentCheckpoint]) -> RecurrentCheckpoint:
    return checkpoints[request.param]


def ask(llm: LLM, prompt: list[int], sampling: SamplingParams = GREEDY) -> tuple[list[int], int]:
    """Return the answer to a prompt, and how many of its tokens were computed."""
    before = llm.core.stats().prefill_tokens
    answer = list(llm.generate([prompt], sampling)[0].outputs[0].token_ids)
    llm.core.check_integrity()
    return answer, llm.core.stats().prefill_tokens - before


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_prompts_in_chunks_of_every_size_beside_decodes(checkpoint: RecurrentCheckpoint, chunk: int) -> None:
    prompts = [tokens(length, seed) for seed, length in enumerate((1, 2, 15, 16, 17, 33, 70))]
    expected = [checkpoint.generate(prompt) for prompt in prompts]
    config = checkpoint.config(prefill_chunk=chunk, max_num_batched_tokens=max(8, chunk), prefix_caching=False)
    with LLM(config) as llm:
        assert [list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY)] == expected
        llm.core.check_integrity()


def test_the_next_turn_computes_what_is_behind_the_snapshot(checkpoint: RecurrentCheckpoint) -> None:
    prompt = tokens(100, 1)
    with LLM(checkpoint.config()) as llm:
        answer, computed = ask(llm, prompt)
        assert (answer, computed) == (checkpoint.generate(prompt), 100)
        turn = prompt + answer + tokens(9, 2)
        end = 99 // BLOCK * BLOCK
        assert ask(llm, turn) == (checkpoint.generate(turn), len(turn) - end)
        assert ask(llm, turn) == (checkpoint.generate(turn), len(turn) - (len(turn) - 1) // BLOCK * BLOCK)


def test_answers_leave_snapshots_too(checkpoint: RecurrentCheckpoint) -> None:
    prompt = tokens(40, 3)
    with LLM(checkpoint.config(state_every=2 * BLOCK)) as llm:
        answer, _ = ask(llm, prompt, GREEDY.replace(max_tokens=60))
        turn = prompt + answer + tokens(3, 4)
        assert ask(llm, turn) == (checkpoint.generate(turn), len(turn) - 3 * 2 * BLOCK)


def test_a_third_prompt_finds_where_the_second_parted(checkpoint: RecurrentCheckpoint) -> None:
    shared = tokens(64, 5)
    first, second, third = (shared + tokens(30, seed) for seed in (6, 7, 8))
    with LLM(checkpoint.config()) as llm:
        assert ask(llm, first) == (checkpoint.generate(first), 94)
        assert ask(llm, second) == (checkpoint.generate(second), 94)  # the KV is there, the states were passed by
        assert ask(llm, third) == (checkpoint.generate(third), 30)


def test_a_snapshot_that_lost_a_block_is_not_used(checkpoints: dict[str, RecurrentCheckpoint]) -> None:
    checkpoint = checkpoints["qwen3_next"]
    prompt = tokens(60, 9)
    with LLM(checkpoint.config()) as llm:
        expected, _ = ask(llm, prompt)
        pool = llm.core._pool
        assert llm.core.executor.state_blocks > 1
        (*_, last) = pool._caches[1]._block_of.values()
        pool.acquire([last])
        pool.forget([last])
        pool.release([last])
        assert ask(llm, prompt) == (expected, 60)


def test_many_conversations_in_a_pool_that_is_too_small(checkpoint: RecurrentCheckpoint) -> None:
    states = load_executor(checkpoint.config()).state_blocks
    prompts = [tokens(20 + 3 * i, i) for i in range(12)]
    expected = [checkpoint.generate(prompt, 40) for prompt in prompts]
    with LLM(checkpoint.config(kv_blocks=2 * states + 16, max_model_len=128, state_every=BLOCK)) as llm:
        for _ in range(2):
            answers = llm.generate(prompts, GREEDY.replace(max_tokens=40))
            assert [list(each.outputs[0].token_ids) for each in answers] == expected
            llm.core.check_integrity()


@pytest.mark.parametrize("count", [1, 9])
def test_roll_back_computes_the_states_again(checkpoint: RecurrentCheckpoint, count: int) -> None:
    prompt = tokens(37, 10)
    expected = checkpoint.generate(prompt, 24)
    with LLM(checkpoint.config()) as llm:
        core: EngineCore = llm.core
        core.add_request(EngineRequest(RequestId("r"), prompt, GREEDY.replace(max_tokens=24)))
        got: list[int] = []
        while len(got) < 12:
            got += [token for output in core.step() for token in output.token_ids]
        core.roll_back(RequestId("r"), count)
        del got[len(got) - count :]
        while core.has_work():
            got += [token for output in core.step() for token in output.token_ids]
        assert got == expected
        core.check_integrity()


def test_samples_log_probabilities_and_an_abort_in_the_middle_of_a_prompt(checkpoint: RecurrentCheckpoint) -> None:
    prompt = tokens(50, 11)
    with LLM(checkpoint.config()) as llm:
        (result,) = llm.generate([prompt], GREEDY.replace(n=3, prompt_logprobs=1))
        assert [list(each.token_ids) for each in result.outputs] == 3 * [checkpoint.generate(prompt)]
        core = llm.core
        core.add_request(EngineRequest(RequestId("a"), tokens(200, 12), GREEDY))
        core.step()
        assert core.abort(RequestId("a"))
        while core.has_work():
            core.step()
        core.check_integrity()
        assert ask(llm, prompt)[0] == checkpoint.generate(prompt)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"speculative": "ngram"}, "speculative"),
        ({"kv_blocks": 4, "max_model_len": None}, "kv_blocks"),
        ({"tp": 2, "executor": "multiprocess"}, "tp"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("warm_followers")
def test_what_states_make_impossible_is_refused(
    checkpoints: dict[str, RecurrentCheckpoint], changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as refused, LLM(checkpoints["qwen3_next"].config(**changes)):
        pass
    assert refused.value.field == field
