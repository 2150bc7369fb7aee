"""GGUF files through the engine: the tokens and logits of transformers over the dequantized weights."""

from __future__ import annotations

import asyncio
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import generate_latest
from tests.support.equality import hf_greedy, mixed_prompts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.gguf_files import dequantized_checkpoint, rewrite_gguf, write_gguf
from tests.support.servers.cluster import LocalCluster

from baton.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.config import EngineConfig
from baton.engine.executor.base import load_executor
from baton.engine.llm import LLM
from baton.engine.models.loader import load_model
from baton.errors import ConfigError
from baton.rpc.channel import open_channel
from baton.types import SamplingParams

NEW_TOKENS = 16
KINDS = {"llama": "Q8_0", "qwen2": "Q4_0", "qwen3": "Q5_1", "gemma2": "Q4_1", "gemma3": "Q5_0", "gemma": "Q8_0"}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.1}
"""As rows of K-quants need it."""


def engine_config(path: Path, **changes: object) -> EngineConfig:
    values = {"dtype": "float32", "kv_blocks": 192, "max_model_len": 512, **changes}
    return EngineConfig(model=str(path), **values)  # type: ignore[arg-type]


def made(root: Path, architecture: str, kind: str, **sizes: object) -> tuple[Path, Path]:
    """Return a GGUF file, and a checkpoint of the same numbers in float32."""
    folder = make_checkpoint(root / "model", architecture, **sizes)
    parameters = write_gguf(folder, root / "m.gguf", kind)
    return root / "m.gguf", dequantized_checkpoint(folder, parameters, root / "plain")


@pytest.mark.parametrize(("architecture", "kind"), KINDS.items())
def test_tokens_are_those_of_the_dequantized_model(tmp_path: Path, architecture: str, kind: str) -> None:
    path, plain = made(tmp_path, architecture, kind)
    prompts = mixed_prompts(1, 512, count=4, longest=60)
    expected = hf_greedy(plain, prompts, NEW_TOKENS)
    with LLM(engine_config(path)) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0))
        assert [output.token_ids for output in outputs] == expected
        text = llm.generate(["def main(argument):"], SamplingParams(max_tokens=4, temperature=0))[0]
        assert llm.tokenizer is not None
        assert text.prompt_token_ids == llm.tokenizer.encode("def main(argument):")
        quality = llm.core.executor.quality
        assert quality is not None
        assert quality.kl < 1e-6
        assert quality.top1 > 0.98
        assert str(quality) in llm.core.executor.description


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32"])
def test_logits_of_other_types(tmp_path: Path, kind: str) -> None:
    path, plain = made(tmp_path, "llama", kind, **WIDE)
    tokens = torch.arange(3, 60)[None]
    with torch.inference_mode():
        expected = load_model(engine_config(plain)).module(tokens).logits
        found = load_model(engine_config(path)).module(tokens).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    executor = load_executor(engine_config(path, layer_groups=False))
    try:
        assert (executor.quality is None) == (kind in {"F16", "BF16", "F32"})
    finally:
        executor.close()


def test_through_prefill_and_decode(tmp_path: Path) -> None:
    path, plain = made(tmp_path, "llama", "Q4_0")
    prompt = mixed_prompts(2, 512, count=1, longest=200)[0] * 4
    expected = hf_greedy(plain, [prompt], NEW_TOKENS)[0]

    async def run() -> None:
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
        async with LocalCluster(engine_config(path)) as cluster:
            answer = await cluster.generate(cluster.decode[0], prompt, sampling)
            async with open_channel(cluster.decode[0].address) as channel:
                info = await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())
            text = generate_latest(cluster.decode[0].context.base.metrics.registry).decode()
        assert "29 x int4 per 32 by " in info.operators
        assert "inputs exact" in info.operators
        assert info.quality_kl < 1e-6
        assert info.quality_top1 > 0.98
        found = dict(re.findall(r"^(baton_engine_quality_\w+) (.+)$", text, re.MULTILINE))
        assert float(found["baton_engine_quality_kl"]) == info.quality_kl
        assert float(found["baton_engine_quality_top1"]) == info.quality_top1
        assert f'baton_engine_operators{{description="{info.operators}"}} 1.0' in text
        assert answer.token_ids == expected
        assert answer.trace.path == common_pb2.PREFILL_PATH_REMOTE

    asyncio.run(run())


@pytest.mark.parametrize("shape", [{"tp": 2}, {"pp": 2}])
def test_divided(tmp_path: Path, shape: dict[str, int]) -> None:
    path, plain = made(tmp_path, "llama", "Q8_0", intermediate_size=128)
    prompts = mixed_prompts(3, 512, count=3, longest=40)
    with LLM(engine_config(path, **shape)) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0))
    assert [output.token_ids for output in outputs] == hf_greedy(plain, prompts, NEW_TOKENS)


def test_a_group_that_would_be_cut_is_refused_naming_tp(tmp_path: Path) -> None:
    path, _ = made(tmp_path, "llama", "Q8_0", intermediate_size=96)  # three groups of 32
    with pytest.raises(ConfigError, match="tp") as refused:
        LLM(engine_config(path, tp=2))
    assert refused.value.field == "tp"


def test_quantization_of_a_plain_file_and_not_of_a_quantized_one(tmp_path: Path) -> None:
    plain, _ = made(tmp_path / "a", "llama", "F32")
    with LLM(engine_config(plain, quantization="int8")) as llm:
        assert llm.core.executor.quality is not None
    packed, _ = made(tmp_path / "b", "llama", "Q8_0")
    with pytest.raises(ConfigError, match="the GGUF file is quantized already"):
        LLM(engine_config(packed, quantization="int8"))


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"blk.2.attn_norm.weight": None}, r"1 missing keys, e\.g\. model\.layers\.2\.input_layernorm\.weight"),
        (
            {"blk.2.attn_norm.weight": np.ones(32, "f4")},
            r"n\.gguf: .*input_layernorm\.weight: must be \[64\], is \[32\]",
        ),
        ({"blk.2.ffn_down.weight": np.ones((96, 64), "f4")}, r"down_proj\.weight: must be \[64, 96\], is \[96, 64\]"),
    ],
)
def test_files_that_do_not_fit_their_metadata(tmp_path: Path, tensors: dict[str, np.ndarray | None], why: str) -> None:
    path, _ = made(tmp_path, "llama", "F32")
    with pytest.raises(ConfigError, match=why):
        load_model(engine_config(rewrite_gguf(path, tmp_path / "n.gguf", {}, tensors)))


def test_a_quantized_matrix_of_another_shape(tmp_path: Path) -> None:
    path, _ = made(tmp_path, "llama", "Q8_0")
    content = path.read_bytes()
    at = content.index(b"blk.2.ffn_up.weight") + len(b"blk.2.ffn_up.weight") + 4
    assert struct.unpack_from("<QQ", content, at) == (64, 96)
    path.write_bytes(content[:at] + struct.pack("<QQ", 96, 64) + content[at + 16 :])
    with pytest.raises(ConfigError, match=r"m\.gguf: .*mlp\.up_proj\.weight: is of a weight \[64, 96\], the model"):
        load_model(engine_config(path))
