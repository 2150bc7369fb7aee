"""The engine of a GPU, its operators in Triton's interpreter: the same tokens as ``generate`` on every path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.equality import hf_greedy, mixed_prompts
from tests.support.models.checkpoints import make_checkpoint

from baton.config import EngineConfig
from baton.engine.llm import LLM
from baton.errors import ConfigError
from baton.types import SamplingParams

VOCAB, NEW_TOKENS = 512, 4


def interpreted(path: object, **changes: object) -> EngineConfig:
    values = {
        "device": "interpret",
        "dtype": "float32",
        "kv_blocks": 24,
        "max_model_len": 48,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        **changes,
    }
    return EngineConfig(model=str(path), **values)


GEMMA = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("architecture", "changes", "path", "graphs"),
    [
        ("llama", {"num_hidden_layers": 2}, "fused decoder", ("2", "4")),
        ("gemma3", {"num_hidden_layers": 2, **GEMMA}, "transformers' modules", ("on",)),
        ("mixtral", {"num_hidden_layers": 1}, "fused decoder", ("off",)),
    ],
)
def test_every_path_gives_the_tokens_of_generate(
    tmp_path: Path, architecture: str, changes: dict[str, Any], path: str, graphs: tuple[str, ...]
) -> None:
    folder = make_checkpoint(tmp_path, architecture, **changes)
    prompts = mixed_prompts(4, VOCAB, count=3, longest=18)
    expected = hf_greedy(folder, prompts, NEW_TOKENS)
    config = interpreted(folder, packed_linears=path == "fused decoder", cuda_graphs=graphs)
    with LLM(config) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
        assert [each.token_ids for each in outputs] == expected
        description = llm.core.executor.description
        assert description.startswith(f"{path}, attention triton, linears torch, device interpret")
        said = {("2", "4"): "graphs of 2 to 4 sequences (2 sizes)", ("on",): "graphs of 1 to 4 sequences (3 sizes)"}
        assert description.endswith(said.get(graphs, "device interpret"))
        llm.core.check_integrity()


def test_bfloat16_is_refused_in_the_interpreter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bfloat16") as caught:
        LLM(interpreted(make_checkpoint(tmp_path, "llama", num_hidden_layers=1), dtype="bfloat16"))
    assert caught.value.field == "dtype"
