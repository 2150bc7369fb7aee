"""What users of vLLM, SGLang and Dynamo type, and what ``baton up`` calls it: hints of errors."""

from __future__ import annotations

import dataclasses

from baton.config.router import RouterConfig
from baton.config.worker import WorkerConfig

_COMMANDS = frozenset({"serve", "run", "launch", "start", "launch_server", "api_server", "server"})
_FLAGS = {
    "--tensor-parallel-size": "--tp",
    "-tp": "--tp",
    "--tp-size": "--tp",
    "--pipeline-parallel-size": "--pp",
    "-pp": "--pp",
    "--pp-size": "--pp",
    "--data-parallel-size": "--ratio, as 2P3D: so many prefill and decode instances",
    "-dp": "--ratio, as 2P3D: so many prefill and decode instances",
    "--dp-size": "--ratio, as 2P3D: so many prefill and decode instances",
    "--disaggregation-mode": "--ratio, as 2P3D: so many prefill and decode instances",
    "--kv-transfer-config": "--ratio, as 2P3D, and --pipe",
    "--model-path": "--model",
    "--gpu-memory-utilization": "--kv-memory-fraction",
    "--mem-fraction-static": "--kv-memory-fraction",
    "--num-gpu-blocks-override": "--kv-blocks",
    "--context-length": "--max-model-len",
    "--chunked-prefill-size": "--prefill-chunk",
    "--max-running-requests": "--max-num-seqs",
    "--kv-cache-dtype": "--kv-dtype",
    "--enable-prefix-caching": "--prefix-caching, which is the default",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--disable-radix-cache": "--no-prefix-caching",
    "--enable-chunked-prefill": "--prefill-chunk; prompts are always computed in chunks",
    "--enforce-eager": "--cuda-graphs off",
    "--disable-cuda-graph": "--cuda-graphs off",
    "--speculative-config": "--speculative, --speculative-model and --speculative-tokens",
    "--num-speculative-tokens": "--speculative-tokens",
    "--scheduling-policy": "--policy",
    "--api-key": "--api-keys FILE",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--ssl-ca-certs": "--tls-ca",
    "--tool-call-parser": "--router-args '--tool-dialect NAME'; by default it is found out",
    "--enable-auto-tool-choice": "nothing: tools are always enabled",
    "--reasoning-parser": "--router-args '--reasoning-dialect NAME'; by default it is found out",
    "--trust-remote-code": "nothing: a model's own code is never run",
}
"""By a flag of another server what to give instead."""


def find_command(word: str) -> str:
    """Return the hint for an unknown command; empty: there is none."""
    return "baton up --model MODEL serves a model" if word in _COMMANDS else ""


def find_up_flag(word: str) -> str:
    """Return the hint for an unknown flag or argument of ``baton up``; empty: there is none."""
    if word in _FLAGS:
        return f"give {_FLAGS[word]}"
    if not word.startswith("-"):
        return f"give --model {word}"
    name = word.removeprefix("--").removeprefix("no-").replace("-", "_")
    services = {"--router-args": RouterConfig, "--prefill-args": WorkerConfig, "--decode-args": WorkerConfig}
    having = [flag for flag, config in services.items() if name in {item.name for item in dataclasses.fields(config)}]
    return f"give it in {' or '.join(having)}, as '{word} ...'" if having else ""
