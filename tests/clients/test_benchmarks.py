"""Benchmark clients: requests, tokens and times that they report are those that the server counted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.clients.conftest import Figures, Server, compared
from tests.clients.environment import PROGRAMS, python

REQUESTS, TOKENS = 8, 12
LIGHT = (
    "numpy",
    "aiohttp",
    "requests",
    "tqdm",
    "transformers>=4.57,<5",
    "pydantic",
    "pillow",
    "setproctitle",
    "ipython",
)
VLLM = (
    "torch", "datasets", "msgspec", "psutil", "cloudpickle", "regex", "cachetools", "blake3", "pyzmq", "openai",
    "prometheus_client", "py-cpuinfo", "gguf", "sentencepiece", "tiktoken", "mistral_common", "einops", "pybase64",
    "cbor2", "uvloop", "partial-json-parser", "fastapi", "pandas", "opencv-python-headless",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What a client says of the requests that it sent; times in milliseconds."""

    requests: float
    output_tokens: float
    input_tokens: float
    ttft_ms: float
    itl_ms: float

    def check(self, name: str, server: Figures, *, extra: int = 0) -> None:
        """Compare with what the server counted.

        Args:
            name: Of the client.
            server: What it counted meanwhile.
            extra: Requests that the client sends first, to see whether the server is there.
        """
        compared(
            name,
            requests=(self.requests, server.finished),
            output_tokens=(self.output_tokens, server.generated_tokens),
            input_tokens=(self.input_tokens, server.prompt_tokens),
            mean_ttft_ms=(self.ttft_ms, server.mean_ttft_ms),
            mean_itl_ms=(self.itl_ms, server.mean_itl_ms),
        )
        assert server.failed == 0
        assert self.requests == REQUESTS
        assert 0 <= server.finished - self.requests <= extra
        if server.finished == self.requests:
            assert self.output_tokens == server.generated_tokens
            # Some count a prompt before the chat template is around it.
            assert server.prompt_tokens - 32 * REQUESTS <= self.input_tokens <= server.prompt_tokens
        assert self.output_tokens == REQUESTS * TOKENS


def test_guidellm(server: Server, tmp_path: Path) -> None:
    client, path = python("guidellm", "guidellm==0.8.1"), tmp_path / "report.json"
    before = server.figures()
    client.run(
        "guidellm", "run",
        "--backend", f"kind=openai_http,target={server.url},model={server.model},request_format=/v1/chat/completions",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={server.tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={TOKENS}",
        "--output", f"kind=json,path={path}", "--disable-console-interactive",
    )  # fmt: skip
    metrics = json.loads(path.read_text())["benchmarks"][0]["metrics"]
    assert metrics["request_totals"]["errored"] == metrics["request_totals"]["incomplete"] == 0
    got = {
        name: value["successful"]
        for name, value in metrics.items()
        if isinstance(value, dict) and "successful" in value
    }
    Report(
        metrics["request_totals"]["successful"],
        got["output_token_count"]["total_sum"],
        got["prompt_token_count"]["total_sum"],
        got["time_to_first_token_ms"]["mean"],
        got["inter_token_latency_ms"]["mean"],
    ).check("guidellm", server.figures() - before, extra=1)


def test_aiperf_with_a_mooncake_schedule(server: Server, tmp_path: Path) -> None:
    client, trace = python("aiperf", "aiperf==0.13.0"), tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 540 + 10 * i, "output_length": TOKENS, "hash_ids": [i // 4, 100 + i]}
        for i in range(REQUESTS)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = server.figures()
    client.run(
        "aiperf", "profile", "--model", server.model, "--url", server.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", server.tokenizer, "--input-file", str(trace), "--custom-dataset-type", "mooncake_trace",
        "--fixed-schedule", "--fixed-schedule-auto-offset", "--use-server-token-count", "--no-auto-plot",
        "--artifact-dir", str(tmp_path / "out"), "--extra-inputs", "ignore_eos:true",
        HF_HUB_OFFLINE="", TRANSFORMERS_OFFLINE="",  # offline it takes no folder
    )  # fmt: skip
    found = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    Report(
        found["request_count"]["avg"],
        found["output_sequence_length"]["sum"],
        found["input_sequence_length"]["sum"],
        found["time_to_first_token"]["avg"],
        found["inter_token_latency"]["avg"],
    ).check("aiperf", server.figures() - before)
    scraped = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())
    assert "baton_request_ttft_seconds" in scraped["metrics"]  # it reads our metrics beside its own


def test_evalscope(server: Server, tmp_path: Path) -> None:
    client = python("evalscope", "evalscope[perf]==1.14.1")
    before = server.figures()
    client.run(
        "evalscope", "perf", "--url", f"{server.url}/v1/chat/completions", "--api", "openai", "--model", server.model,
        "--tokenizer-path", server.tokenizer, "--dataset", "random", "--min-prompt-length", "60",
        "--max-prompt-length", "80", "--min-tokens", str(TOKENS), "--max-tokens", str(TOKENS), "--extra-args",
        '{"ignore_eos": true}', "-n", str(REQUESTS), "--parallel", "2", "--stream", "--no-timestamp",
        "--outputs-dir", str(tmp_path / "out"),
    )  # fmt: skip
    (path,) = (tmp_path / "out").glob("**/benchmark_summary.json")
    found = json.loads(path.read_text())
    assert found["Failed Requests"] == 0
    Report(
        found["Success Requests"],
        found["Avg Output Tokens"] * REQUESTS,
        found["Avg Input Tokens"] * REQUESTS,
        found["Avg TTFT (ms)"],
        found["Avg ITL (ms)"],
    ).check("evalscope", server.figures() - before, extra=1)


def test_sglangs_benchmark(server: Server, tmp_path: Path) -> None:
    # Newer releases want a GPU's packages for their benchmark, too.
    client, path = python("sglang", *LIGHT, bare=("sglang==0.4.6.post5",)), tmp_path / "out.jsonl"
    before = server.figures()
    client.run(
        "python", "-m", "sglang.bench_serving", "--backend", "vllm", "--base-url", server.url, "--model", server.model,
        "--tokenizer", server.tokenizer, "--dataset-name", "random-ids", "--num-prompts", str(REQUESTS),
        "--random-input-len", "64", "--random-output-len", str(TOKENS), "--random-range-ratio", "1",
        "--max-concurrency", "2", "--output-file", str(path),
    )  # fmt: skip
    found = json.loads(path.read_text())
    Report(
        found["completed"],
        found["total_output_tokens"],
        found["total_input_tokens"],
        found["mean_ttft_ms"],
        found["mean_itl_ms"],
    ).check("sglang.bench_serving", server.figures() - before, extra=1)


def test_vllms_benchmark(server: Server, tmp_path: Path) -> None:
    client = python("vllm", *LIGHT, *VLLM, bare=("vllm==0.11.0",))
    before = server.figures()
    client.run(
        "python", str(PROGRAMS / "vllm_bench.py"), "--backend", "openai", "--base-url", server.url,
        "--model", server.model, "--tokenizer", server.tokenizer, "--dataset-name", "random",
        "--random-input-len", "64", "--random-output-len", str(TOKENS), "--num-prompts", str(REQUESTS),
        "--max-concurrency", "2", "--ignore-eos", "--save-result", "--result-dir", str(tmp_path),
        "--result-filename", "result.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "result.json").read_text())
    Report(
        found["completed"],
        found["total_output_tokens"],
        found["total_input_tokens"],
        found["mean_ttft_ms"],
        found["mean_itl_ms"],
    ).check("vllm bench serve", server.figures() - before, extra=1)


def test_inference_perf(server: Server, tmp_path: Path) -> None:
    client = python("inference-perf", "inference-perf==0.7.0", least=(3, 12))
    length = {"type": "fixed", "min": 64, "max": 64, "mean": 64, "std_dev": 0, "total_count": REQUESTS}
    answer = {**length, "min": TOKENS, "max": TOKENS, "mean": TOKENS}
    config = {
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "random", "input_distribution": length, "output_distribution": answer},
        "load": {
            "type": "concurrent",
            "stages": [{"concurrency_level": 2, "num_requests": REQUESTS}],
            "num_workers": 1,
        },
        "server": {"type": "vllm", "model_name": server.model, "base_url": server.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": server.tokenizer},
        "storage": {"local_storage": {"path": str(tmp_path / "out")}},
    }
    path = tmp_path / "config.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    before = server.figures()
    client.run("inference-perf", "--config_file", str(path))
    (path,) = (tmp_path / "out").glob("**/summary_lifecycle_metrics.json")
    found = json.loads(path.read_text())
    assert found["failures"]["count"] == 0
    done = found["successes"]
    Report(
        done["count"],
        done["output_tokens"]["total"],
        done["prompt_tokens"]["total"],
        1e3 * done["latency"]["time_to_first_token"]["mean"],
        1e3 * done["latency"]["inter_token_latency"]["mean"],
    ).check("inference-perf", server.figures() - before)
