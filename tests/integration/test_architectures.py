"""Every causal language model of the installed transformers: the tokens of ``generate``, or refused with the reason.

Tiny float32 checkpoints, made from the config classes. Each that is served gives the tokens of ``generate`` alone,
batched with its prompts in chunks, from the prefix cache, preempted, and handed over from a prefill instance, at
positions beyond the original context too where rope scales. What is found is in ``docs/models.md``, which
``python scripts/gen_models_docs.py`` brings up to date (``--only NAME``: some rows of it).
"""

from __future__ import annotations

import asyncio
import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models.architectures import (
    ORIGINAL_LEN,
    VOCAB,
    Case,
    cases,
    division_notes,
    make_model,
    outcome,
    read_table,
    refusals_of_two_ranks,
)
from tests.support.preemption import expect_short_outputs
from tests.support.servers.cluster import LocalCluster
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from baton.api.v1 import common_pb2
from baton.config import EngineConfig
from baton.engine.executor.base import load_executor
from baton.engine.llm import LLM
from baton.engine.models import loader, quirks
from baton.errors import ConfigError
from baton.types import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = (1, 5, 17, 60, 65, 3 * ORIGINAL_LEN)
NEW_TOKENS = 10
GROWING = 5
GROWING_TOKENS = 18


DOC = Path(__file__).resolve().parents[2] / "docs" / "models.md"


@functools.cache
def documented() -> dict[str, tuple[str, ...]]:
    """Path, or "refused", tp, pp and the notes, by the name of the case."""
    return read_table(DOC.read_text())


def engine_config(path: Path, **changes: Any) -> EngineConfig:
    values = {"dtype": "float32", "kv_blocks": 128, "prefill_chunk": 32, "max_num_batched_tokens": 96, **changes}
    return EngineConfig(model=str(path), **values)


def prompts_of(model_len: int) -> list[list[int]]:
    """Prompts of mixed lengths, two of which begin alike, as far as a model's length has room for them."""
    rng = random.Random(7)
    shared = [rng.randrange(8, VOCAB) for _ in range(48)]
    prompts = []
    for length in LENGTHS:
        tokens = [rng.randrange(8, VOCAB) for _ in range(length)]
        if length in {60, 65}:
            tokens[:48] = shared
        prompts.append(tokens[: model_len - NEW_TOKENS - 1])
    return prompts


def generate(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What transformers gives, each prompt by itself, whatever ends it meets."""
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            found.append(output[0, len(prompt) :].tolist())
    return found


def sampling(new_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)


def check_alone_batched_and_cached(path: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    ask = sampling(NEW_TOKENS)
    with LLM(engine_config(path)) as llm:
        assert [output.token_ids for output in llm.generate(prompts, ask)] == expected
        before = llm.core.stats().prefix_hit_tokens
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert llm.generate([prompt], ask)[0].token_ids == tokens
        assert llm.core.stats().prefix_hit_tokens - before >= sum((len(prompt) - 1) // 16 * 16 for prompt in prompts)
        llm.core.clear_cache()
        for prompt, tokens in zip(prompts[-2:], expected[-2:], strict=True):
            assert llm.generate([prompt], ask)[0].token_ids == tokens
        llm.core.check_integrity()


def check_preempted(path: Path, model: Any) -> None:
    rng = random.Random(8)
    states = load_executor(engine_config(path)).state_blocks
    prompts = [[rng.randrange(8, VOCAB) for _ in range(5 + 2 * (i % GROWING))] for i in range(GROWING + states)]
    expected = generate(model, prompts, GROWING_TOKENS)
    # Of states one is loaded while another one is written.
    with LLM(engine_config(path, kv_blocks=8 + 2 * states, max_model_len=64)) as llm:
        expect_short_outputs(llm.core)
        outputs = llm.generate(prompts, sampling(GROWING_TOKENS))
        assert [output.token_ids for output in outputs] == expected
        assert llm.core.stats().num_preemptions > 0
        llm.core.check_integrity()


async def check_handed_over(path: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    async with LocalCluster(engine_config(path), decode_pipes=[("memory",)]) as cluster:
        calls = (cluster.generate(cluster.decode[0], prompt, sampling(NEW_TOKENS)) for prompt in prompts)
        results = await asyncio.gather(*calls)
        assert [result.token_ids for result in results] == expected
        for prompt, result in zip(prompts, results, strict=True):
            if len(prompt) > 16:
                assert result.trace.path == common_pb2.PREFILL_PATH_REMOTE
                assert result.trace.transferred_tokens > 0
        await cluster.check_integrity()


@pytest.mark.parametrize("case", cases(), ids=str)
async def test_equal_in_every_way_or_refused_with_the_reason(case: Case, tmp_path: Path) -> None:
    found = outcome(case, tmp_path)
    path, tp, pp, notes = documented()[str(case)]
    if found.model is None:
        assert (path, notes) == ("refused", found.refusal)
        return
    assert path == found.path
    # Without the two ranks' forward, which gen_models_docs.py runs: every refusal is known before one.
    refusals = refusals_of_two_ranks(tmp_path)
    assert {"tp": tp, "pp": pp} == {name: "no" if why else "yes" for name, why in refusals.items()}
    division = [note for note in notes.split("; ") if note.startswith(("tp: ", "pp: ", "tp, pp: "))]
    assert division == division_notes(refusals)
    prompts = prompts_of(found.longest)
    expected = generate(found.model, prompts, NEW_TOKENS)
    check_alone_batched_and_cached(tmp_path, prompts, expected)
    check_preempted(tmp_path, found.model)
    await check_handed_over(tmp_path, prompts, expected)


def test_the_document_has_all_of_them() -> None:
    assert set(documented()) == {str(case) for case in cases()}
    assert {case.model_type for case in cases()} == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


SPARSE = ("axk2", "deepseek_v32", "deepseek_v4", "dots3_note", "glm_moe_dsa", "hy_v4", "minimax_m3_vl_text")


@pytest.mark.parametrize("model_type", SPARSE)
def test_sparse_attention_is_refused_before_weights_are_read(model_type: str, tmp_path: Path) -> None:
    found = outcome(Case(model_type), tmp_path)
    assert "an indexer picks the keys of each query" in found.refusal


@pytest.mark.parametrize("model_type", ["hy_v4", "deepseek_v32", "minimax_m3_vl_text"])
def test_sparse_attention_that_its_config_does_not_tell_of_is_refused_all_the_same(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the self-check, which runs the modules: with what they pass on, or what they fail for."""
    monkeypatch.setattr(loader, "unserved_layers", lambda config: "")
    make_model(Case(model_type), tmp_path)
    with pytest.raises(
        ConfigError, match=r"cannot be served: it(s code fails over a paged KV cache| passes)"
    ) as refused:
        load_executor(engine_config(tmp_path))
    assert refused.value.field == "model"


def test_a_type_with_the_parts_of_llama_is_not_fused_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by its name, and were it on the list: the self-check sees what its queries are scaled by far out."""
    make_model(next(case for case in cases() if str(case) == "ministral3-scaled-queries"), tmp_path)
    assert load_executor(engine_config(tmp_path)).description.startswith("transformers' modules")
    monkeypatch.setitem(quirks.FUSED_FAMILIES, "ministral3", quirks.Family())
    assert load_executor(engine_config(tmp_path)).description.startswith("transformers' modules")


def test_chunks_of_attention_have_to_be_whole_blocks(tmp_path: Path) -> None:
    make_model(Case("llama4_text", changes={"attention_chunk_size": 72}), tmp_path)
    with pytest.raises(ConfigError, match="does not divide the 72 tokens of the chunks") as refused:
        load_executor(engine_config(tmp_path))
    assert refused.value.field == "block_size"
