"""Drafters on the engine of a GPU, its operators in Triton's interpreter: the tokens of the engine without them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.integration.engine.speculation.test_draft_heads import tokens_of, write_head
from tests.integration.engine.test_interpreted_device import ONE_LAYER, VOCAB, interpreted, short_self_checks
from tests.support.equality import mixed_prompts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.next_token import write_next_token
from tests.support.servers.cluster import LocalCluster

from baton.api.v1 import common_pb2
from baton.config import EngineConfig
from baton.engine.device_memory import DeviceArena
from baton.engine.llm import LLM
from baton.engine.sampler_row import SamplerRow
from baton.engine.speculation.chain import ModelDrafter
from baton.engine.speculation.methods import load_drafter
from baton.engine.speculation.rejection import DrawnDraft, keep_or_replace
from baton.engine.speculation.speculator import SpeculationStats, Speculator
from baton.types import SamplingParams

__all__ = ["short_self_checks"]

pytestmark = pytest.mark.usefixtures("short_self_checks")
NEW_TOKENS = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
SAMPLINGS = [GREEDY, GREEDY.replace(temperature=0.7, seed=3)]
PROMPTS = [[9, 12, 33] * 3, mixed_prompts(4, VOCAB, count=2, longest=14)[1]]
MIMO = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_layer_types": ["dense"]}


def small_llama(folder: Path) -> Path:
    return make_checkpoint(folder / "model", "llama", **ONE_LAYER)


def with_head(folder: Path, method: str) -> tuple[Path, dict[str, Any]]:
    """Return a model, and the options by which it is drafted for."""
    if method == "mtp":
        return write_next_token(folder, "mimo_v2_flash", **MIMO).folder, {"speculative": method}
    model = small_llama(folder)
    return model, {"speculative": method, "speculative_model": str(write_head(folder / "head", method, model))}


def answers(config: EngineConfig) -> list[list[list[int]]]:
    with LLM(config) as llm:
        return tokens_of(llm.generate(PROMPTS, SAMPLINGS))


def stats_of(llm: LLM) -> SpeculationStats:
    assert llm.core.speculator is not None
    stats = llm.core.speculator.stats
    assert not stats.faults
    assert stats.drafted.total() > 0
    return stats


def test_answers_are_those_without_drafts(tmp_path: Path) -> None:
    """By a draft model, whose pool is on the device too, by look-ups and by heads that read hidden states alone."""
    model = small_llama(tmp_path)
    options = {"speculative": "draft", "speculative_model": str(model), "speculative_tokens": 2, "cuda_graphs": ("2",)}
    with LLM(interpreted(model, device="cpu")) as llm:
        plain = tokens_of(llm.generate(PROMPTS, SAMPLINGS))
        repeating = [each.replace(logit_bias={33: 9.0}) for each in SAMPLINGS]
        repeated = tokens_of(llm.generate(PROMPTS, repeating))
    config = interpreted(model, **options)
    with LLM(config) as llm:
        executor: Any = llm.core.executor
        assert "attention triton" in executor.description
        assert executor.description.endswith("graphs of 2 to 2 sequences (1 sizes), also with 2 drafts each")
        steps = executor._runner._graphs._steps
        captured, replay = steps[3, 2]
        replayed: list[int] = []
        steps[3, 2] = captured, lambda: replayed.append(1) or replay()  # type: ignore[func-returns-value]
        assert tokens_of(llm.generate(PROMPTS, SAMPLINGS)) == plain
        assert tokens_of(llm.generate(PROMPTS[:1], SAMPLINGS[:1])) == plain[:1]
        assert replayed
        stats = stats_of(llm)
        assert stats.accepted == stats.drafted
        assert llm.core.speculator is not None
        drafter = llm.core.speculator.drafter
        assert isinstance(drafter, ModelDrafter)
        assert all(isinstance(arena, DeviceArena) for arena in drafter._shards.arenas)
        assert "graphs of 2" in drafter._executor.description
        head = str(write_head(tmp_path / "head", "medusa", model))
        for method, width, samplings, expected in (
            ("suffix", 2, repeating, repeated),
            ("medusa", 2, SAMPLINGS, plain),
        ):
            own = {"speculative": method, "speculative_width": width}
            own["speculative_model"] = head if method == "medusa" else ""
            changed = dataclasses.replace(config, **own)
            other = load_drafter(changed, llm.core.executor)
            assert other is not None
            llm.core.speculator = Speculator(changed, other, VOCAB)
            assert tokens_of(llm.generate(PROMPTS, samplings)) == expected
            stats_of(llm)
        llm.core.check_integrity()
        drafter.close()


@pytest.mark.parametrize(("method", "width"), [("eagle", 1), ("mtp", 1)])
def test_answers_are_those_without_a_head(tmp_path: Path, method: str, width: int) -> None:
    """Also from the prefix cache, whose blocks have the head's KV too."""
    model, options = with_head(tmp_path, method)
    options |= {"speculative_tokens": 2, "speculative_width": width, "block_size": 8, "cuda_graphs": ("off",)}
    plain = answers(interpreted(model, device="cpu"))
    with LLM(interpreted(model, **options)) as llm:
        for _ in range(2):
            assert tokens_of(llm.generate(PROMPTS, SAMPLINGS)) == plain
        assert stats_of(llm).context["known"] > 0
        llm.core.check_integrity()


async def test_a_prompt_that_is_handed_over_comes_with_the_heads_kv(tmp_path: Path) -> None:
    """From device to device."""
    model, options = with_head(tmp_path, "eagle3")
    options |= {"speculative_tokens": 2, "speculative_width": 2, "cuda_graphs": ("off",)}
    plain = answers(interpreted(model, device="cpu"))
    async with LocalCluster(interpreted(model, **options), decode_pipes=[("cuda_ipc",)]) as cluster:
        (decode,) = cluster.decode
        for prompt, sampling, (expected,) in zip(PROMPTS, SAMPLINGS, plain, strict=True):
            result = await cluster.generate(decode, prompt, sampling)
            assert result.token_ids == expected
            assert result.trace.path == common_pb2.PREFILL_PATH_REMOTE
            assert result.trace.pipe == "cuda_ipc"
        speculator = decode.context.engine.core.speculator
        assert speculator is not None
        assert speculator.stats.context == {"known": sum(len(prompt) - 1 for prompt in PROMPTS), "lacking": 0}
        assert speculator.stats.drafted.total() > 0
        assert not speculator.stats.faults


def test_a_gpus_operator_rejects_what_the_definition_rejects() -> None:
    vocab, rng = 300, np.random.default_rng(3)
    params = SamplingParams(temperature=0.8, top_k=40)
    drafts = []
    for seed, (length, drawn) in enumerate([(2, True), (3, False), (2, True), (1, True)]):
        row = SamplerRow(params, seed, stop_ids=(), prompt=(), output=())
        rows = [row]
        tokens = rng.integers(0, vocab, length).tolist()
        for token in tokens:
            rows.append(rows[-1].after(token))
        logits = torch.from_numpy(rng.normal(size=(length + 1, vocab)).astype(np.float32))
        logits[torch.arange(length), torch.tensor(tokens)] += 3.0
        probs = torch.softmax(logits[:length] + torch.randn(length, vocab, generator=torch.manual_seed(seed)), -1)
        drafts.append(DrawnDraft(logits, rows, tokens, probs.numpy() if drawn else None))
    wanted = keep_or_replace(drafts)
    assert keep_or_replace(drafts, on_gpu=True) == wanted
    assert len({len(tokens) - len(each.draft) for tokens, each in zip(wanted, drafts, strict=True)}) > 1
