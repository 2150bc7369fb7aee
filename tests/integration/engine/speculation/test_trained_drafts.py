"""The weights that draft for the demo model: they are small, fit it, change no token, and know what it will say."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from scripts.demo_model.corpus import is_held_out
from scripts.demo_model.draft_card import render_card

from baton.config import EngineConfig
from baton.config.demo_model import DEMO_DRAFTS, default_draft, default_model
from baton.engine.llm import LLM
from baton.tokenizer import Tokenizer
from baton.types import SamplingParams

FOLDERS = {method: Path(default_draft(method)) for method in DEMO_DRAFTS}
LEAST = 0.1
"""Share of first draft tokens that has to be right; of tokens at random it would be a 4096th."""
HELD_OUT = ("heapq.py", "zipapp.py", "genericpath.py", "unittest/loader.py")
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model=default_model(), dtype="float32", kv_blocks=128, **options)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Beginnings of modules that neither the demo model nor what drafts for it has seen."""
    tokenizer = Tokenizer.load(default_model())
    assert all(map(is_held_out, HELD_OUT))
    root = Path(sysconfig.get_path("stdlib"))
    return [tokenizer.encode((root / name).read_text("utf-8"))[:128] for name in HELD_OUT]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    with LLM(config()) as llm:
        yield [list(output.token_ids) for output in llm.generate(prompts, [GREEDY] * len(prompts))]


@pytest.mark.parametrize("method", DEMO_DRAFTS)
def test_no_token_changes_and_many_drafts_are_right(
    method: str, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    with LLM(config(speculative=method, speculative_model=str(FOLDERS[method]), speculative_tokens=4)) as llm:
        outputs = llm.generate(prompts, [GREEDY] * len(prompts))
        assert [list(output.token_ids) for output in outputs] == plain
        assert llm.core.speculator is not None
        stats = llm.core.speculator.stats
    assert not stats.faults
    assert stats.drafted[0] > 40
    assert stats.accepted[0] > LEAST * stats.drafted[0]
    assert stats.accepted[1] > 0


@pytest.mark.parametrize("method", DEMO_DRAFTS)
def test_files_are_small_and_described(method: str) -> None:
    folder = FOLDERS[method]
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3_000_000
    with safe_open(folder / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
    assert {dtype for name, dtype in dtypes.items() if name not in {"d2t", "token_map"}} == {torch.bfloat16}
    log = [json.loads(line) for line in (folder / "training_log.jsonl").read_text("utf-8").splitlines()]
    assert (folder / "README.md").read_text("utf-8") == render_card(log)
    assert log[0]["method"] == method
    assert log[-1]["steps"] == log[-2]["step"]
    assert log[-2]["loss"][0] < log[1]["loss"][0]
