"""Trees of drafts over real checkpoints: the tokens of the engine without, whatever attention, width and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.engine.speculation.test_draft_heads import METHODS, tokens_of, write_head
from tests.integration.engine.speculation.test_speculation_equality import SAMPLINGS, VOCAB, check_same, config, prompts
from tests.integration.engine.test_attention_plugin import installed
from tests.support.equality import References
from tests.support.models.architectures import Case, make_model
from tests.support.models.drafters import RecordedTreeDrafter
from tests.support.models.next_token import write_next_token

from baton.config import EngineConfig
from baton.engine.llm import LLM, RequestOutput
from baton.engine.speculation.eagle import EagleDrafter
from baton.engine.speculation.speculator import Speculator
from baton.errors import ConfigError

__all__ = ["installed"]

CASES = [
    ("llama", 4, {}),
    ("gemma3", 2, {}),  # sliding windows, in blocks of their own
    ("gpt_oss", 4, {"layer_groups": False}),  # windows and sinks
    ("deepseek_v3", 4, {}),  # latents
    ("mistral", 4, {"attention_backend": "torch", "packed_linears": False}),
    ("qwen3", 4, {"kv_dtype": "int8"}),
    ("llama", 2, {"tp": 2}),
    ("llama", 2, {"pp": 2}),
]


def right_drafts(llm: LLM, plain: list[RequestOutput], width: int, first: int) -> RecordedTreeDrafter:
    """Have drafts that are mostly right, for requests whose numbers begin with ``first``."""
    known = {
        (f"llm-{first + i}", sequence.index): list(sequence.token_ids)
        for i, output in enumerate(plain)
        for sequence in output.outputs
    }
    drafter = RecordedTreeDrafter(known, width=width, probability=0.8, vocab_size=VOCAB)
    llm.core.speculator = Speculator(llm.config, drafter, VOCAB)
    return drafter


@pytest.mark.parametrize(("architecture", "width", "options"), CASES, ids=str)
def test_answers_are_those_without_speculation(
    references: References, architecture: str, width: int, options: dict[str, Any]
) -> None:
    with LLM(config(references, architecture, **options)) as llm:
        plain = llm.generate(prompts(), SAMPLINGS)
    trees = {"speculative": "suffix", "speculative_tokens": 4, "speculative_width": width, **options}
    with LLM(config(references, architecture, **trees)) as llm:
        check_same(llm.generate(prompts(), SAMPLINGS), plain)
        right_drafts(llm, plain, width, len(SAMPLINGS))
        check_same(llm.generate(prompts(), SAMPLINGS), plain)
        assert llm.core.speculator is not None
        stats = llm.core.speculator.stats
        assert not stats.faults
        assert stats.accepted[0] / stats.steps > 0.5
        assert stats.drafted[0] > 1.5 * stats.steps
        # And what was kept of them is found again, and leads to the same answers.
        check_same(llm.generate(prompts(), [s.replace(speculative_tokens=0) for s in SAMPLINGS]), plain)
        llm.core.check_integrity()
        assert llm.core.stats().blocks_active == 0


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("method", [*METHODS, "mtp"])
def test_answers_are_those_without_a_head(references: References, tmp_path: Path, method: str, width: int) -> None:
    options: dict[str, Any] = {"speculative": method, "speculative_width": width, "speculative_tokens": 3}
    if method == "mtp":
        target = write_next_token(tmp_path, "deepseek_v3").folder
    else:
        target = references.checkpoint({"eagle": "gemma3", "eagle3": "llama", "medusa": "qwen3_moe"}[method])
        options["speculative_model"] = str(write_head(tmp_path / "head", method, target))
    # The checkpoint with a next-token layer has no tokenizer, which grammars need.
    samplings = [s for s in SAMPLINGS if method != "mtp" or s.grammar is None]
    texts = prompts()[: len(samplings)]
    shared = {"model": str(target), "dtype": "float32", "kv_blocks": 192, "prefill_chunk": 64}
    with LLM(EngineConfig(**shared)) as llm:
        plain = tokens_of(llm.generate(texts, samplings))
    with LLM(EngineConfig(**shared, **options)) as llm:
        for _ in range(2):  # again: from the prefix cache, so that heads never see most hidden states
            assert tokens_of(llm.generate(texts, samplings)) == plain
        assert llm.core.speculator is not None
        stats = llm.core.speculator.stats
        assert not stats.faults
        assert stats.drafted[0] > 1.5 * stats.steps
        llm.core.check_integrity()
        drafter = llm.core.speculator.drafter
        if isinstance(drafter, EagleDrafter):
            assert not drafter._states
            assert len(drafter._free) == len(set(drafter._free)) == drafter._pool.k.shape[0]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_tree_of_a_head_has_the_chains_of_its_paths(references: References, tmp_path: Path, method: str) -> None:
    """Each path is scored as a chain of the same tokens would be: siblings do not see each other."""
    target = references.checkpoint("llama")
    head = write_head(tmp_path / "head", method, target)
    options = {"speculative": method, "speculative_model": str(head), "speculative_tokens": 3}
    prompt = max(prompts(), key=len)
    chains, trees = [], []
    for width, found in ((1, chains), (3, trees)):
        with LLM(config(references, "llama", speculative_width=width, **options)) as llm:
            assert llm.core.speculator is not None
            drafter = llm.core.speculator.drafter
            propose = drafter.propose

            def recording(wanted: Any, propose: Any = propose, found: list[Any] = found) -> Any:
                proposals = propose(wanted)
                found.extend(zip([s.num_tokens for s, _ in wanted], proposals, strict=True))
                return proposals

            drafter.propose = recording  # type: ignore[method-assign]
            llm.generate([prompt], SAMPLINGS[0])
    by_length = {count: proposal for count, proposal in trees if proposal.token_ids}
    compared = 0
    for count, chain in chains:
        tree = by_length.get(count)
        if tree is None or not chain.token_ids:
            continue
        # The likeliest first child of each token: the chain's token, where it was kept in the tree.
        node = -1
        for token in chain.token_ids:
            children = [i for i, parent in enumerate(tree.parents) if parent == node]
            if not children:
                break
            assert tree.token_ids[children[0]] == token
            node = children[0]
            compared += 1
    assert compared > 10


@pytest.mark.usefixtures("installed")
def test_attention_that_knows_no_trees_is_refused_at_start(references: References, tmp_path: Path) -> None:
    chunks = tmp_path / "chunks"
    make_model(Case("llama4_text", changes={"attention_chunk_size": 64}), chunks)
    for model, backend, said in (
        (chunks, "auto", "within chunks"),
        (references.checkpoint("llama"), "gather", "gather takes no trees"),
    ):
        options: dict[str, Any] = {"speculative": "suffix", "speculative_width": 2, "attention_backend": backend}
        with (
            pytest.raises(ConfigError) as caught,
            LLM(EngineConfig(model=str(model), dtype="float32", kv_blocks=64, **options)),
        ):
            pass
        assert caught.value.field == "speculative_width"
        assert said in caught.value.message


def test_kv_of_eight_bits_is_moved_with_its_scales() -> None:
    from baton.engine.runner.model_runner import _kept_per_token
    from baton_kernels.paged_attention import LayerPool

    k = torch.zeros(4, 2, 8, 16, dtype=torch.int8)
    scales = torch.zeros(4, 2, 8, dtype=torch.bfloat16)
    assert [tuple(part.shape) for part in _kept_per_token(LayerPool(k, k.clone(), 0, scales, scales.clone()))] == [
        (4, 2, 8, 16),
        (4, 2, 8, 16),
        (4, 2, 8),
        (4, 2, 8),
    ]
    of_heads = torch.ones(2)
    fp8 = k.view(torch.float8_e4m3fn)
    assert len(_kept_per_token(LayerPool(fp8, fp8.clone(), 0, of_heads, of_heads))) == 2
    assert len(_kept_per_token(LayerPool(k, k[..., :8]))) == 1  # latents
