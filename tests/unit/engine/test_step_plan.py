"""Plans with several query tokens of a decoding sequence, and batches in buffers at fixed addresses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.models.step_plans import feed_drafts, kv_of
from tests.support.models.toy_runner import ToyRunner

from baton.config import EngineConfig
from baton.engine.core import EngineCore
from baton.engine.request import EngineRequest
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput, InputBuffers
from baton.types import RequestId, SamplingParams

BLOCK = 4
PROMPT = [5, 9, 14, 33, 21, 7, 50]


def make_core(runner: ToyRunner) -> EngineCore:
    config = EngineConfig(block_size=BLOCK, prefill_chunk=8, max_num_batched_tokens=24, max_num_seqs=8)
    return EngineCore(config, runner, runner.make_arena(64))


@pytest.mark.parametrize("widths", [[1] * 12, [4, 4, 4], [2, 1, 5, 3, 1], [12]], ids=str)
def test_known_tokens_several_at_a_time_give_the_same_kv_and_logits(widths: list[int]) -> None:
    runner = ToyRunner(block_size=BLOCK, eos=63)
    known = runner.greedy(PROMPT, 12, ignore_eos=True)
    core = make_core(runner)
    got = feed_drafts(core, PROMPT, known, widths)
    want = runner.reference_logits(PROMPT + known)[len(PROMPT) :]
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-5)
    other = make_core(ToyRunner(block_size=BLOCK, eos=63))
    straight = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True)
    other.add_request(EngineRequest(RequestId("straight"), PROMPT, straight))
    for _ in range(12):
        other.step()
    length = len(PROMPT) + 11
    ours, theirs = (kv_of(one, name, length) for one, name in ((core, "known"), (other, "straight")))
    assert np.array_equal(ours.view(np.float32), theirs.view(np.float32))


class Recorder(ToyRunner):
    """Notes where each step's arrays lie."""

    def __init__(self) -> None:
        super().__init__(block_size=BLOCK, eos=63)
        self.places: list[tuple[int, ...]] = []

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run a step."""
        arrays = (batch.token_ids, batch.positions, batch.query_starts, batch.context_lens, batch.block_tables)
        self.places.append(tuple(array.ctypes.data for array in arrays))
        return super().forward(batch)


def test_with_input_buffers_a_bucket_keeps_its_addresses_and_tokens_are_the_same() -> None:
    prompts = [PROMPT, PROMPT[::-1], PROMPT[:3] * 5]
    tokens: list[list[list[int]]] = []
    for buffers in (None, InputBuffers()):
        runner = Recorder()
        runner.input_buffers = buffers
        core = make_core(runner)
        found: dict[str, list[int]] = {f"r{i}": [] for i in range(len(prompts))}
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=6 + 4 * i, ignore_eos=True)
            core.add_request(EngineRequest(RequestId(f"r{i}"), prompt, params))
        while core.has_work():
            for output in core.step():
                found[output.request_id] += output.token_ids
        tokens.append(list(found.values()))
        if buffers is not None:
            # 3 and 2 sequences, then 1; tables up to 8 blocks wide: few buckets, whatever the number of steps.
            assert len(runner.places) >= 14
            assert len(set(runner.places)) <= 6
    assert tokens[0] == tokens[1]
    reference = ToyRunner(block_size=BLOCK, eos=63)
    assert tokens[0] == [reference.greedy(p, 6 + 4 * i, ignore_eos=True) for i, p in enumerate(prompts)]


def test_hidden_states_come_if_they_are_asked_for() -> None:
    runner = ToyRunner(block_size=BLOCK)
    runner.make_arena(4)
    batch = ForwardBatch(
        token_ids=np.array(PROMPT),
        positions=np.arange(7),
        query_starts=np.array([0, 7], np.int32),
        context_lens=np.array([7], np.int32),
        block_tables=np.array([[0, 1]], np.int32),
        logit_rows=np.array([2, 6]),
        hidden_of=(-1,),
    )
    output = runner.forward(batch)
    (hidden,) = output.hidden
    assert torch.equal((torch.tanh(hidden[[2, 6]]) @ runner._head).float(), output.logits)
