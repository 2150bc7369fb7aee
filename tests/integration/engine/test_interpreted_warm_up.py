"""A GPU compiles at load what steps will launch, and nothing while it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.gpu_compiler import CARDS, recorded_variants
from tests.support.models.checkpoints import make_checkpoint

from baton.config import EngineConfig
from baton.engine.llm import LLM
from baton.types import SamplingParams
from baton_kernels.gpu import is_interpreted

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="kernels run on a GPU here")
VOCAB = 512
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("llama", {}), ("llama", {"kv_dtype": "int8", "cuda_graphs": ("2",)}), ("gpt_oss", {})],
)
def test_nothing_is_compiled_after_load(tmp_path: Path, architecture: str, options: dict[str, Any]) -> None:
    folder = make_checkpoint(tmp_path, architecture, **{**SMALL, "vocab_size": VOCAB})
    sizes = {"kv_blocks": 64, "max_model_len": 600, "max_num_seqs": 3, "max_num_batched_tokens": 40}
    config = EngineConfig(model=str(folder), device="interpret", dtype="float32", **sizes, **options)
    random = np.random.default_rng(3)
    with recorded_variants(CARDS[90], run=True) as variants, LLM(config) as llm:
        executor: Any = llm.core.executor
        executor.warm_up()
        loaded = {name: set(each) for name, each in variants.items()}
        assert len(loaded["_copy_kernel"]) == 2  # to the host and back
        prompts = [random.integers(8, VOCAB, int(size)).tolist() for size in (3, 41, 17, 1, 60)]
        ways = [SamplingParams(temperature=0.0, max_tokens=3), SamplingParams(top_k=5, top_p=0.9, seed=1, max_tokens=3)]
        ways += [SamplingParams(temperature=0.5, presence_penalty=1.0, seed=2, max_tokens=4)]
        llm.generate(prompts, [ways[index % len(ways)] for index in range(len(prompts))])
        new = {name: each - loaded.get(name, set()) for name, each in variants.items()}
        assert not {name: each for name, each in new.items() if each}
        llm.core.check_integrity()
