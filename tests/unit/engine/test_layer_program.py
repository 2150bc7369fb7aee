"""A decoder's layers as one list of calls: the same bits as operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.models.checkpoints import make_checkpoint

from baton.config import EngineConfig
from baton.engine.build import make_arena
from baton.engine.executor.base import load_executor
from baton.engine.models import fused
from baton.engine.models.fused import LayerProgram, UnboundError
from baton.engine.runner.input_batch import ForwardBatch
from baton_kernels.cpu import load_library, runnable_variants
from baton_kernels.cpu.library import BoundCall, NativeCalls
from baton_kernels.paged_attention.cpu import AttentionCall
from baton_kernels.row_wise import CpuRmsNorm, rms_norm_reference

BLOCK = 16
BLOCKS = ([7, 3, 21, 4, 30], [11, 12], [5, 40])
"""Of three sequences."""


def batch(pieces: list[tuple[list[int], int, list[int]]]) -> ForwardBatch:
    """One step over (new tokens, tokens before, blocks) per sequence, with the logits of every new token."""
    counts = [len(tokens) for tokens, _, _ in pieces]
    width = max(len(blocks) for _, _, blocks in pieces)
    return ForwardBatch(
        token_ids=np.array([token for tokens, _, _ in pieces for token in tokens], dtype=np.int64),
        positions=np.concatenate([np.arange(done, done + len(tokens)) for tokens, done, _ in pieces]),
        query_starts=np.array([0, *np.cumsum(counts)], dtype=np.int32),
        context_lens=np.array([done + len(tokens) for tokens, done, _ in pieces], dtype=np.int32),
        block_tables=np.array([blocks + [0] * (width - len(blocks)) for _, _, blocks in pieces], dtype=np.int32),
        logit_rows=np.arange(sum(counts), dtype=np.int64),
    )


def steps() -> list[ForwardBatch]:
    """Prompts in chunks, side by side, then decodes of three sequences, of one, and beside a chunk."""
    rng = np.random.default_rng(0)
    first, second, third = (rng.integers(8, 512, 75).tolist() for _ in range(3))
    made = [
        batch([(first[:20], 0, BLOCKS[0])]),
        batch([(first[20:61], 20, BLOCKS[0]), (second[:9], 0, BLOCKS[1]), (third[:30], 0, BLOCKS[2])]),
    ]
    for at in range(2):
        tails = ((first, 61), (second, 9), (third, 30))
        made.append(batch([(tokens[n + at : n + at + 1], n + at, BLOCKS[i]) for i, (tokens, n) in enumerate(tails)]))
    made.append(batch([(second[11:12], 11, BLOCKS[1])]))
    made.append(batch([(second[12:13], 12, BLOCKS[1]), (first[63:], 63, BLOCKS[0])]))
    return made


COUNTS = [len(step.token_ids) for step in steps()]


class Noted:
    """Keeps how many tokens programs were run for, the self-check's among them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[int] = []
        run = LayerProgram.run

        def noted(program: LayerProgram, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
            self.runs.append(len(hidden))
            return run(program, hidden, *args)

        monkeypatch.setattr(LayerProgram, "run", noted)


def logits_of(
    path: Path, on_layer: Callable[[int], None] | None = None, **options: Any
) -> tuple[list[torch.Tensor], str]:
    """The logits of all steps, and the path that was taken."""
    config = EngineConfig(model=str(path), **{"dtype": "bfloat16", "kv_blocks": 50, **options})
    executor = load_executor(config)
    arena = make_arena(config, executor)
    try:
        executor.on_layer = on_layer
        return [executor.forward(step).logits.clone() for step in steps()], executor.description
    finally:
        arena.close()


def refuse(*_: Any) -> None:
    raise UnboundError("not today")


@pytest.mark.parametrize(
    ("architecture", "bound", "options"),
    [
        ("llama", True, {}),
        ("qwen2", True, {}),
        ("qwen3", True, {}),
        ("phi3", True, {}),
        ("glm4", True, {}),
        ("gemma2", True, {}),
        ("gemma3", True, {}),
        ("olmo3", False, {}),
        ("mixtral", False, {}),
        ("deepseek_v3", False, {}),
        ("llama", True, {"quantization": "int8"}),
        ("qwen3", True, {"quantization": "int4", "quantized_activations": "none"}),
        ("llama", True, {"kv_dtype": "int8"}),
        ("llama", False, {"dtype": "float32"}),
    ],
    ids=str,
)
def test_the_same_bits_as_operator_by_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, bound: bool, options: dict[str, Any]
) -> None:
    path = make_checkpoint(tmp_path, architecture)
    with monkeypatch.context() as patch:
        noted = Noted(patch)
        got, taken = logits_of(path, **options)
    assert taken.startswith("fused decoder")
    assert (noted.runs[-len(steps()) :] == COUNTS) == bound
    assert bound or not noted.runs
    monkeypatch.setattr(fused, "LayerProgram", refuse)
    want, _ = logits_of(path, **options)
    assert all(map(torch.equal, got, want))


def test_who_waits_for_layers_is_told_of_each_as_soon_as_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, "llama")
    told: list[int] = []
    noted = Noted(monkeypatch)
    got, _ = logits_of(path, told.append)
    assert noted.runs[-len(COUNTS) :] == COUNTS
    layers = max(told) + 1
    assert layers > 1
    assert told == list(range(layers)) * len(COUNTS)
    want, _ = logits_of(path)
    assert all(map(torch.equal, got, want))


def test_steps_of_more_tokens_run_operator_by_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path, "llama")
    want, _ = logits_of(path)
    monkeypatch.setattr(fused, "MAX_ROWS", 16)
    noted = Noted(monkeypatch)
    got, _ = logits_of(path)
    few = [count for count in COUNTS if count <= 16]
    assert 0 < len(few) < len(COUNTS)
    assert max(noted.runs) <= 16
    assert noted.runs[-len(few) :] == few
    assert all(map(torch.equal, got, want))


def test_a_call_that_is_refused_is_named_and_none_behind_it_is_made() -> None:
    library = load_library(runnable_variants()[0])
    x, out = torch.randn(4, 32), torch.zeros(4, 32)
    norm = CpuRmsNorm(library, torch.ones(32), 1e-6)
    refused = BoundCall(library.paged_attention, AttentionCall(dtype=7), (), checked=True)
    there, back = norm.bind(x, out), norm.bind(out, x)
    assert there is not None
    assert back is not None
    calls = NativeCalls(library, [there, refused, back])
    calls.resize(3, 1)
    before = x.clone()
    with pytest.raises(ValueError, match="AttentionCall"):
        calls.run()
    torch.testing.assert_close(out[:3], rms_norm_reference(before[:3], torch.ones(32), 1e-6))
    assert not out[3].any()
    assert torch.equal(x, before)
