"""``benchmarks/engine.py --device cuda:0``: one engine on a GPU against what the GPU can do, measured in the same run.

A random Llama of the shape of Llama-3.1-8B in bfloat16. Decode: batches of sequences with the same context, greedy,
counted while all of them run; prefill: the time to the first token of one prompt. Beside each figure stands the share
of the roofline: a decode step reads all weights but the embedding and the KV of its contexts, at the speed at which the
GPU copies (bytes read and written); a prompt's products and attention at the speed of a large product of matrices.

``outside`` is the part of a decode step in which the device computes nothing: one minus its kernels' time, by torch's
profiler over some steps, divided by the time of as many steps without the profiler. ``plain_order`` has the same of the
same engine with ``--async-scheduling off``: the next step is launched when the one before was read. Both orders take
turns.

``--device interpret --smoke`` (with TRITON_INTERPRET=1) runs the same code with a tiny model, to see that it runs; its
figures say nothing.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from baton.config import EngineConfig
from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.device import compute_device
from baton.engine.request import EngineRequest
from baton.types import RequestId, SamplingParams

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
WEIGHT_BYTES = {"none": 0.0, "int8": 1.0, "int4": 0.5 + 8 / 64, "fp8": 1.0, "nf4": 0.5 + 4 / 64}
"""Of a weight of a layer that is quantized at load, scales and zeros of groups included; 0: those of its dtype."""


@dataclass(frozen=True)
class Load:
    """What is measured.

    Attributes:
        decode: Batch sizes.
        prefill: Tokens of prompts.
        context: Tokens before the first new one of decoding sequences.
        new_tokens: Tokens generated per prompt.
    """

    decode: tuple[int, ...] = (1, 8, 64, 256)
    prefill: tuple[int, ...] = (2048, 8192)
    context: int = 1024
    new_tokens: int = 128


SMOKE = Load((1, 2), (24,), 16, 4)


def measure_on_device(device: str, *, smoke: bool, repeats: int, **options: Any) -> dict[str, Any]:
    """Measure all of it.

    Args:
        device: As ``--device`` names it.
        smoke: Whether with a tiny model.
        repeats: Runs per workload; medians are returned.
        options: More of the engine's configuration: graphs, quantized weights, what KV is kept as.
    """
    value = compute_device(device)
    shape, load, dtype = (TINY, SMOKE, "float32") if smoke else (LLAMA_8B, Load(), "bfloat16")
    ceilings = measure_ceilings(value.memory, DTYPES[dtype], smoke=smoke)
    print(f"ceilings: {ceilings}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="baton-8b-") as folder:
        parameters = write_llama(Path(folder), shape, DTYPES[dtype], value.memory)
        longest = max(*load.prefill, load.context + load.new_tokens + 1) + 16
        config = EngineConfig(
            model=folder,
            device=device,
            max_model_len=longest,
            max_num_seqs=max(load.decode),
            max_num_batched_tokens=max(load.prefill),
            prefill_chunk=max(load.prefill),
            kv_blocks=64 if smoke else None,
            prefix_caching=False,
            **options,
        )
        begin = time.perf_counter()
        engine = build_engine(config)
        loaded_s = time.perf_counter() - begin
        bench = DeviceBench(engine, shape, ceilings, weight_bytes(config.quantization, shape, DTYPES[dtype].itemsize))
        result = {
            "benchmark": "engine_on_device",
            "device": torch.cuda.get_device_name(value.memory) if value.is_cuda else device,
            "path": engine.executor.description,
            "parameters": parameters,
            "load_s": round(loaded_s, 1),
            "ceilings": ceilings,
            "decode": {str(batch): bench.decode(batch, load, repeats) for batch in load.decode},
            "prefill": {str(tokens): bench.prefill(tokens, repeats) for tokens in load.prefill},
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        engine.executor.close()
    return result


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, smoke: bool) -> dict[str, float]:
    """Return the device's copy bandwidth, bytes read and written per second, and its rate of products, FLOP/s."""
    size, side, turns = (1 << 20, 64, 2) if smoke else (1 << 30, 8192, 20)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    copy_s = seconds_of(lambda: target.copy_(source), device, turns)
    product_s = seconds_of(lambda: torch.mm(a, b), device, turns)
    return {"copy_bytes_per_s": 2 * size / copy_s, "flop_per_s": 2 * side**3 / product_s}


def seconds_of(call: Callable[[], object], device: torch.device, turns: int) -> float:
    """Return the median seconds of a call on the device."""
    times = []
    for turn in range(turns + 3):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        if turn >= 3:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write_llama(folder: Path, shape: dict[str, int], dtype: torch.dtype, device: torch.device) -> int:
    """Write a random Llama, a file per layer, drawn on the device; returns its parameters."""
    config = transformers.LlamaConfig(
        **shape, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype=dtype
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    hidden = shape["hidden_size"]
    inner = shape["intermediate_size"]
    vocab = shape["vocab_size"]
    heads, kv = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    files = [{"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,), "lm_head": (vocab, hidden)}]
    files += [
        {f"model.layers.{index}.{name}": size for name, size in layer.items()}
        for index in range(shape["num_hidden_layers"])
    ]
    torch.manual_seed(0)
    names = {}
    total = 0
    for number, tensors in enumerate(files):
        file = f"model-{number:05}.safetensors"
        made = {}
        for name, size in tensors.items():
            ones = len(size) == 1
            value = torch.ones(size) if ones else torch.randn(size, device=device).mul_(size[-1] ** -0.5)
            made[f"{name}.weight"] = value.to(dtype).cpu().contiguous()
            names[f"{name}.weight"] = file
            total += value.numel()
        save_file(made, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return total


def weights_of_a_layer(shape: dict[str, int]) -> int:
    """How many numbers the products of a layer multiply by."""
    hidden = shape["hidden_size"]
    attention = 2 * hidden * (shape["num_attention_heads"] + shape["num_key_value_heads"]) * shape["head_dim"]
    return attention + 3 * hidden * shape["intermediate_size"]


def weight_bytes(quantization: str, shape: dict[str, int], plain: int) -> float:
    """Bytes of all weights that a decode step reads; the head is not quantized, and a number of it has ``plain``."""
    layers = shape["num_hidden_layers"] * weights_of_a_layer(shape)
    return layers * (WEIGHT_BYTES[quantization] or plain) + shape["hidden_size"] * shape["vocab_size"] * plain


class DeviceBench:
    """Measures an engine against ceilings.

    Args:
        engine: Nothing else uses it.
        shape: Configuration of the model (``config.json``).
        ceilings: Result of :func:`measure_ceilings`.
        weights: Bytes of those that a decode step reads.
    """

    def __init__(self, engine: EngineCore, shape: dict[str, int], ceilings: dict[str, float], weights: float) -> None:
        self._engine = engine
        self._shape = shape
        self._ceilings = ceilings
        self._weights = weights
        self._number = 0
        self._per_layer = weights_of_a_layer(shape)
        layout = engine.executor.layout
        self._kv_bytes = layout.block_bytes / layout.block_size

    def decode(self, batch: int, load: Load, repeats: int) -> dict[str, Any]:
        """Tokens per second of a full batch, and shares; also in the plain order, if steps are launched ahead."""
        steps = self._engine.steps
        orders = [True, False] if steps.ahead else [False]
        speeds = dict[bool, list[float]]()
        for repeat in range(repeats + 1):
            for ahead in orders:
                steps.ahead = ahead
                speed = self._decode_once(batch, load)
                if repeat:
                    speeds.setdefault(ahead, []).append(speed)
        result = {}
        for ahead in orders:
            steps.ahead = ahead
            result[ahead] = self._figures(batch, load, speeds[ahead])
        steps.ahead = orders[0]
        return {**result[orders[0]], **({"plain_order": result[False]} if orders[0] else {})}

    def _figures(self, batch: int, load: Load, speeds: list[float]) -> dict[str, Any]:
        speed = statistics.median(speeds)
        context = load.context + load.new_tokens / 2
        step_bytes = self._weights + batch * context * self._kv_bytes
        roofline = batch * self._ceilings["copy_bytes_per_s"] / step_bytes
        step_s = batch / speed
        busy_s = self._busy_s(batch, load)
        return {
            "tokens_per_s": round(speed, 1),
            "spread": [round(min(speeds), 1), round(max(speeds), 1)],
            "step_ms": round(1e3 * step_s, 3),
            "share_of_roofline": round(speed / roofline, 3),
            "outside": None if busy_s is None else round(max(0.0, 1 - busy_s / step_s), 3),
        }

    def prefill(self, tokens: int, repeats: int) -> dict[str, Any]:
        """Tokens per second of one prompt, and its share of the products' rate."""
        times = []
        for _ in range(repeats + 1):
            self._add(tokens, 1)
            begin = time.perf_counter()
            self._run()
            times.append(time.perf_counter() - begin)
        seconds = statistics.median(times[1:])
        shape = self._shape
        layers = shape["num_hidden_layers"]
        width = shape["num_attention_heads"] * shape["head_dim"]
        flops = 2 * layers * self._per_layer * tokens + 2 * layers * width * tokens**2
        return {
            "tokens_per_s": round(tokens / seconds, 1),
            "ttft_ms": round(1e3 * seconds, 2),
            "share_of_roofline": round(flops / seconds / self._ceilings["flop_per_s"], 3),
        }

    def _decode_once(self, batch: int, load: Load) -> float:
        for _ in range(batch):
            self._add(load.context, load.new_tokens + 1)
        done: dict[RequestId, int] = {}
        while len(done) < batch:
            self._step(done)
        before = sum(done.values())
        begin = time.perf_counter()
        # Until the first of them ends: the batch is full.
        while self._engine.has_work() and max(done.values()) <= load.new_tokens:
            self._step(done)
        seconds = time.perf_counter() - begin
        count = sum(done.values()) - before
        self._run()
        return count / seconds

    def _busy_s(self, batch: int, load: Load) -> float | None:
        """Seconds of kernels per decode step; ``None`` without a GPU."""
        if self._engine.executor.device.type != "cuda":
            return None
        steps = min(16, load.new_tokens // 2)
        for _ in range(batch):
            self._add(load.context, load.new_tokens + 1)
        done: dict[RequestId, int] = {}
        while len(done) < batch:
            self._step(done)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(steps):
                self._step(done)
        self._run()
        kernels = sum(event.self_device_time_total for event in profile.key_averages())
        return float(kernels) * 1e-6 / steps

    def _add(self, context: int, new_tokens: int) -> None:
        self._number += 1
        generator = np.random.default_rng(self._number)
        prompt = generator.integers(3, self._shape["vocab_size"], context).tolist()
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        self._engine.add_request(EngineRequest(RequestId(str(self._number)), prompt, sampling))

    def _step(self, done: dict[RequestId, int]) -> None:
        for output in self._engine.step():
            if output.error:
                raise RuntimeError(output.error)
            done[output.request_id] = done.get(output.request_id, 0) + len(output.token_ids)

    def _run(self) -> None:
        done: dict[RequestId, int] = {}
        while self._engine.has_work():
            self._step(done)
