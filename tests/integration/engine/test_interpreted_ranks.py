"""Several ranks on devices, in Triton's interpreter: the tokens of ``generate``, and hand-over between shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.integration.engine.test_interpreted_device import interpreted, short_self_checks
from tests.support.equality import hf_greedy, mixed_prompts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.cluster import LocalCluster

from baton.config import EngineConfig
from baton.engine import device as compute
from baton.engine.device import ComputeDevice
from baton.engine.device_memory import DeviceArena
from baton.engine.llm import LLM
from baton.errors import ConfigError
from baton.types import SamplingParams

__all__ = ["short_self_checks"]

pytestmark = pytest.mark.usefixtures("warm_followers", "short_self_checks")
VOCAB, NEW_TOKENS = 512, 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
PROMPTS = mixed_prompts(4, VOCAB, count=2, longest=14)
SHAPES = [(2, 1, "cuda_ipc", "fused decoder"), (1, 2, "tcp", "transformers' modules")]


def write_model(folder: Path, layers: int) -> Path:
    return make_checkpoint(
        folder, "llama", num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32
    )


def test_stages_give_the_tokens_of_generate(tmp_path: Path) -> None:
    model = write_model(tmp_path, layers=2)
    expected = hf_greedy(model, PROMPTS, NEW_TOKENS)
    with LLM(interpreted(model, pp=2, cuda_graphs=("2",))) as llm:
        assert [each.token_ids for each in llm.generate(PROMPTS, GREEDY)] == expected
        description = llm.core.executor.description
        assert description.startswith("fused decoder, attention triton")
        assert description.endswith("pp 2, device interpret, graphs of 2 to 2 sequences (1 sizes)")
        assert all(isinstance(arena, DeviceArena) for arena in llm.core.shards.arenas)
        llm.core.check_integrity()


@pytest.mark.parametrize(("prefill", "decode", "pipe", "path"), SHAPES)
async def test_hand_over_between_shapes(tmp_path: Path, prefill: int, decode: int, pipe: str, path: str) -> None:
    model = write_model(tmp_path, layers=1)
    expected = hf_greedy(model, PROMPTS, NEW_TOKENS)
    config = interpreted(model, tp=prefill, cuda_graphs=("1",), packed_linears=path == "fused decoder")
    async with LocalCluster(config, decode_pipes=[(pipe,)], decode_changes={"tp": decode}) as cluster:
        await cluster.check_handed_over(PROMPTS, GREEDY, expected, pipe)
        await cluster.check_integrity()
        description = cluster.decode[0].context.engine.core.executor.description
        assert description.startswith(f"{path}, attention triton")
        assert description.endswith("graphs of 1 to 1 sequences (1 sizes)")


def test_devices_that_are_not_there_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(compute, "compute_device", lambda name: ComputeDevice(torch.device(name), on_gpu=True))
    for name, names in (("cuda", ["cuda:0", "cuda:1"]), ("cuda:1", ["cuda:1", "cuda:2"])):
        assert [str(compute.rank_device(name, rank, 2).memory) for rank in range(2)] == names
    assert str(compute.rank_device("cuda:2,cuda:0", 1, 2).memory) == "cuda:0"
    with pytest.raises(ConfigError, match="make 2 ranks, which need cuda:2 to cuda:3: torch sees 3") as caught:
        LLM(EngineConfig(device="cuda:2", tp=2))
    assert caught.value.field == "tp"
    for device, tp, said in (
        ("cuda:0,cuda:1", 1, "names 2 devices, but tp 1 and pp 1 make 1 ranks"),
        ("cuda:0,cuda:0", 2, "a list is of different GPUs"),
        ("cpu,cuda:0", 2, "a list is of different GPUs"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            EngineConfig(device=device, tp=tp)
        assert caught.value.field == "device"
