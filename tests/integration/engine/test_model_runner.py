"""The model side of the engine on its own: what it loads, what it refuses, and that its numbers are transformers'."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.models.checkpoints import make_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from baton.config import EngineConfig
from baton.engine.build import make_arena, plan_kv_blocks
from baton.engine.executor.base import Executor, load_executor
from baton.engine.llm import LLM
from baton.engine.models.fused import FusedDecoder
from baton.engine.models.loader import quiet_transformers
from baton.engine.runner.input_batch import ForwardBatch
from baton.errors import ConfigError
from baton.types import SamplingParams

BLOCK = 16


def config(path: Any, **changes: Any) -> EngineConfig:
    return EngineConfig(model=str(path), **{"dtype": "float32", "kv_blocks": 40, **changes})


@pytest.fixture
def llama(tmp_path):
    return make_checkpoint(tmp_path / "llama", "llama")


def run(runner: Executor, pieces: list[tuple[list[int], int, list[int]]]) -> torch.Tensor:
    """One step over (new tokens, tokens before, blocks) per sequence; returns the logits of every new token."""
    counts = [len(tokens) for tokens, _, _ in pieces]
    width = max(len(blocks) for _, _, blocks in pieces)
    total = sum(counts)
    batch = ForwardBatch(
        token_ids=np.array([t for tokens, _, _ in pieces for t in tokens], dtype=np.int64),
        positions=np.concatenate([np.arange(done, done + len(tokens)) for tokens, done, _ in pieces]),
        query_starts=np.array([0, *np.cumsum(counts)], dtype=np.int32),
        context_lens=np.array([done + len(tokens) for tokens, done, _ in pieces], dtype=np.int32),
        block_tables=np.array([blocks + [0] * (width - len(blocks)) for _, _, blocks in pieces], dtype=np.int32),
        logit_rows=np.arange(total, dtype=np.int64),
    )
    return runner.forward(batch).logits.float().clone()


def reference(path: Any, tokens: list[int]) -> torch.Tensor:
    with quiet_transformers(), torch.inference_mode():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        return model(torch.tensor([tokens])).logits[0]


FEATURES = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "gpt_oss", "deepseek_v3", "qwen2", "phi3"]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("architecture", FEATURES)
def test_logits_are_those_of_transformers_in_chunks_and_ragged_batches(tmp_path, architecture, backend, packed):
    path = make_checkpoint(tmp_path, architecture)
    runner = load_executor(config(path, attention_backend=backend, packed_linears=packed))
    arena = make_arena(runner.config, runner)
    rng = np.random.default_rng(0)
    long, short = rng.integers(8, 512, 75).tolist(), rng.integers(8, 512, 9).tolist()
    long_blocks, short_blocks = [7, 3, 21, 4, 30], [11]
    # A chunk alone; a chunk beside another prompt; decodes one by one beside a chunk.
    logits = [run(runner, [(long[:20], 0, long_blocks)])]
    both = run(runner, [(long[20:61], 20, long_blocks), (short[:5], 0, short_blocks)])
    logits.append(both[:41])
    others = [both[41:]]
    for at in range(4):
        both = run(
            runner, [(short[5 + at : 6 + at], 5 + at, short_blocks), (long[61 + at : 62 + at], 61 + at, long_blocks)]
        )
        others.append(both[:1])
        logits.append(both[1:])
    logits.append(run(runner, [(long[65:], 65, long_blocks)]))
    for tokens, got in ((long, torch.cat(logits)), (short, torch.cat(others))):
        want = reference(path, tokens)
        assert (got - want).abs().max() <= 2e-4 * want.abs().max()
    arena.close()


def test_bfloat16_is_near(tmp_path):
    path = make_checkpoint(tmp_path, "llama")
    runner = load_executor(config(path, dtype="bfloat16"))
    arena = make_arena(runner.config, runner)
    tokens = np.random.default_rng(1).integers(8, 512, 60).tolist()
    got, want = run(runner, [(tokens, 0, [1, 2, 3, 4])]), reference(path, tokens)
    assert (got - want).norm() <= 0.12 * want.norm()  # weights this large lose digits in bfloat16
    arena.close()


@pytest.mark.parametrize(("architecture", "wrong"), [("llama", 1), ("mixtral", 8)])
def test_in_16_bits_a_path_that_is_wrong_in_few_tokens_is_not_taken(tmp_path, monkeypatch, architecture, wrong):
    """Not seen by the median of all: one token of a dense model, a short sequence of a mixture."""
    path = make_checkpoint(tmp_path, architecture, initializer_range=0.05)
    assert load_executor(config(path, dtype="bfloat16")).description.startswith("fused decoder")
    forward = FusedDecoder.forward

    def garbled(*args: Any) -> Any:
        logits, hidden = forward(*args)
        logits[-wrong:] = logits[-wrong:].roll(1, dims=1)
        return logits, hidden

    monkeypatch.setattr(FusedDecoder, "forward", garbled)
    assert load_executor(config(path, dtype="bfloat16")).description.startswith("transformers' modules")


def refused(path: Any, **changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_executor(config(path, **changes))
    assert "\n" not in caught.value.message
    return caught.value


def test_a_path_that_is_not_there(tmp_path):
    assert refused(tmp_path / "nothing").field == "model"


def test_a_folder_without_a_config(tmp_path):
    assert "config.json" in refused(tmp_path).message


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "no_such_model"}'])
def test_a_config_that_cannot_be_read(llama, text):
    (llama / "config.json").write_text(text)
    assert refused(llama).field == "model"


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_a_truncated_checkpoint(llama, keep):
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert refused(llama).field == "model"


def test_a_checkpoint_with_a_tensor_missing(llama):
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    assert "up_proj" in refused(llama).message


def test_no_weights_at_all(llama):
    (llama / "model.safetensors").unlink()
    assert refused(llama).field == "model"


@pytest.mark.parametrize("model_type", ["bloom", "mpt"])
def test_an_architecture_whose_attention_cannot_be_replaced_is_refused_by_name(tmp_path, model_type):
    sizes = {"vocab_size": 64, "hidden_size": 32, "d_model": 32, "n_layer": 1, "n_layers": 1, "n_head": 2, "n_heads": 2}
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
        model.save_pretrained(tmp_path)
    error = refused(tmp_path)
    assert model_type in error.message.lower()
    assert error.field == "model"


@pytest.mark.parametrize("shortest", [0, 9], ids=["always", "not in the trial run"])
@pytest.mark.parametrize(
    ("passed", "words"),
    [
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "an attention mask of its own"),
        ({"chosen_keys": torch.zeros(1)}, "it passes chosen_keys to its attention, which Baton does not use"),
        ({"is_causal": False}, "it passes is_causal=False to its attention"),
    ],
    ids=["mask", "keys", "not causal"],
)
def test_what_a_module_passes_to_its_attention_and_nobody_uses_is_refused(llama, monkeypatch, shortest, passed, words):
    forward = LlamaAttention.forward

    def with_more(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        more = passed if hidden_states.shape[1] >= shortest else {}
        return forward(self, hidden_states, *args, **{**kwargs, **more})

    monkeypatch.setattr(LlamaAttention, "forward", with_more)
    error = refused(llama)
    assert words in error.message
    assert error.field == "model"


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"device": "abacus"}, "device"), ({"device": "cuda:7"}, "device"), ({"max_model_len": 5000}, "max_model_len")],
)
def test_settings_that_cannot_work(llama, changes, field):
    assert refused(llama, **changes).field == field


def test_ends_beyond_the_vocabulary_are_left_out(llama, tmp_path, caplog):
    copy = shutil.copytree(llama, tmp_path / "copy")
    vocab = json.loads((copy / "config.json").read_text())["vocab_size"]
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 3, vocab]}))
    with LLM(config(copy)) as llm:
        assert f"[-1, {vocab}]" in caplog.text
        sampling = SamplingParams(temperature=0.0, max_tokens=6, min_tokens=5)
        held, beside = llm.generate([[5, 6, 7], [8, 9]], [sampling, SamplingParams(temperature=0.0, max_tokens=6)])
        assert 5 <= len(held.token_ids) <= 6
        assert 3 not in held.token_ids[:5]
        assert beside.token_ids


def test_another_rope_is_another_fingerprint(llama, tmp_path):
    copy = shutil.copytree(llama, tmp_path / "copy")
    changed = json.loads((copy / "config.json").read_text())
    for holder in (changed, changed.get("rope_parameters") or {}):
        holder["rope_theta"] = 77.0
    (copy / "config.json").write_text(json.dumps(changed))
    one, other = load_executor(config(llama)).fingerprint, load_executor(config(copy)).fingerprint
    assert one.rope != other.rope
    assert one.content_key() != other.content_key()


def test_the_pool_is_what_was_asked_for_or_what_memory_holds(llama):
    runner = load_executor(config(llama, kv_blocks=None, kv_memory_fraction=0.01, max_num_seqs=2))
    blocks = plan_kv_blocks(runner.config, runner)
    assert runner.max_model_len // BLOCK <= blocks <= 2 * runner.max_model_len // BLOCK + 2
    assert plan_kv_blocks(config(llama, kv_blocks=77), runner) == 77


def test_a_pool_too_small_lowers_the_model_length_or_refuses_the_one_asked_for(llama, caplog):
    runner = load_executor(config(llama))
    plan_kv_blocks(config(llama, kv_blocks=10), runner)
    assert runner.max_model_len == 10 * BLOCK
    assert "lowered" in caplog.text
    with pytest.raises(ConfigError) as caught:
        plan_kv_blocks(config(llama, kv_blocks=10, max_model_len=500), load_executor(config(llama)))
    assert caught.value.field == "kv_blocks"
