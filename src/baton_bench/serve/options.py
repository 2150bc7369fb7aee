"""Options of ``baton bench serve``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from baton.config.flags import option
from baton.errors import ConfigError
from baton_bench.report import check_positive, check_ranges

DATASETS = ("random", "shared-prefix", "jsonl", "sharegpt", "mooncake")
ARRIVALS = ("auto", "closed", "constant", "poisson", "gamma", "trace")
ENDPOINTS = ("completions", "chat", "grpc")
SLO_METRICS = ("ttft", "tpot", "itl", "e2e")
_SLO = re.compile(r"(\w+):(\d+(?:\.\d+)?)(us|ms|s)?")
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_MOST = 10**7


@dataclass(frozen=True)
class ServeOptions:
    """The requests to send, their arrivals, and what to report."""

    url: str = option("http://127.0.0.1:8000", "the service: its address without /v1; for --endpoint grpc host:port")
    endpoint: str = option("completions", "what is asked; grpc: a Baton router, through the SDK", choices=ENDPOINTS)
    model: str = option("", "model to ask for; default: the first that the service lists")
    api_key: str = option("", "API key, sent as a bearer token", secret=True)
    tokenizer: str = option("", "directory or hub name of the model's tokenizer: prompts are sent as text then")
    vocab_size: int = option(4096, "without --tokenizer prompts are random token ids below this")
    dataset: str = option("random", "prompts", choices=DATASETS)
    file: str = option("", "file of --dataset jsonl, sharegpt or mooncake")
    trace: str = option("", "replay a trace, as baton bench router reads it: at its times, or after its answers")
    scale: float = option(1.0, "trace: share of its prompts' and answers' lengths")
    requests: int | None = option(None, "requests that count; default: all of --file or --trace, else 100")
    isl: int = option(512, "random, shared-prefix: prompt tokens, without the shared prefix")
    osl: int = option(128, "output tokens, where the data set does not say")
    range_ratio: float = option(0.0, "random, shared-prefix: lengths are drawn from (1 - X) to (1 + X) times the mean")
    num_prefixes: int = option(4, "shared-prefix: prefixes; each request has one of them")
    prefix_len: int = option(512, "shared-prefix: tokens of each prefix")
    ignore_eos: bool = option(True, "generate all output tokens; off for services that do not know ignore_eos")
    arrival: str = option(
        "auto",
        "when requests are sent; closed: a new one when one ends (--max-concurrency); trace: its times; "
        "auto: trace for --trace and mooncake, poisson with --request-rate, else closed",
        choices=ARRIVALS,
    )
    request_rate: float | None = option(None, "requests per second")
    burstiness: float = option(1.0, "gamma: shape of the pauses; 1: poisson, less: bursts, more: even")
    speedup: float = option(1.0, "trace: let requests arrive so many times faster")
    max_concurrency: int | None = option(None, "requests in flight at most; default: any number")
    warmup: int = option(2, "requests sent before those that count")
    timeout_s: float = option(600.0, "seconds that a request may take")
    seed: int = option(0, "seed of prompts and arrivals")
    find_knee: bool = option(False, "find the highest rate at which --slo is kept, by bisection")
    attainment: float = option(0.9, "find-knee: share of the requests that must keep --slo")
    knee_precision: float = option(0.1, "find-knee: width of the bracket at which it ends, as a share of the rate")
    knee_max_rate: float = option(1024.0, "find-knee: highest rate tried, requests per second")
    details: bool = option(False, "with --json, a record per request, with all its gaps")

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, float]] = dict.fromkeys(
            ("requests", "isl", "osl", "num_prefixes", "max_concurrency"), (1, _MOST)
        )
        ranges |= {"warmup": (0, _MOST), "prefix_len": (1, _MOST), "vocab_size": (16, 2**31), "seed": (0, 2**32)}
        ranges |= {"range_ratio": (0.0, 1.0), "attainment": (0.01, 1.0), "knee_precision": (0.001, 1.0)}
        check_ranges(self, ranges)
        check_positive(self, "request_rate", "burstiness", "speedup", "scale", "timeout_s", "knee_max_rate")
        if self.range_ratio >= 1.0:
            raise ConfigError("--range-ratio must be below 1", field="range_ratio")
        self._check_target()
        self._check_arrival()
        if self.trace and (self.file or self.dataset != "random"):
            raise ConfigError("--trace comes without --dataset and --file", field="trace")
        needs_file = self.dataset in ("jsonl", "sharegpt", "mooncake")
        if needs_file != bool(self.file):
            text = f"needs --file with --dataset {self.dataset}" if needs_file else "is for other data sets: no --file"
            raise ConfigError(f"--dataset {self.dataset} {text}", field="file")

    def _check_target(self) -> None:
        if self.endpoint == "grpc":
            host, _, port = self.url.rpartition(":")
            if not host or not port.isdigit() or "/" in self.url:
                raise ConfigError(f"--endpoint grpc needs --url host:port, got {self.url!r}", field="url")
        else:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"--url must look like http://host:8000, got {self.url!r}", field="url")
        if self.endpoint == "chat" and not self.tokenizer and self.dataset not in ("jsonl", "sharegpt"):
            raise ConfigError("--endpoint chat takes text: give --tokenizer", field="tokenizer")

    def _check_arrival(self) -> None:
        kind = self.arrival_kind
        if kind in ("constant", "poisson", "gamma") and self.request_rate is None and not self.find_knee:
            raise ConfigError(f"--arrival {kind} needs --request-rate", field="request_rate")
        if kind in ("closed", "trace") and self.request_rate is not None:
            raise ConfigError(f"--arrival {kind} has no --request-rate", field="request_rate")
        if kind == "trace" and not self.trace_file:
            raise ConfigError("--arrival trace needs --trace or --dataset mooncake", field="arrival")
        if self.find_knee and kind == "trace":
            raise ConfigError("--find-knee sets the rate: give --arrival poisson, constant or gamma", field="arrival")

    @property
    def arrival_kind(self) -> str:
        """Kind of arrivals: ``--arrival``, with ``auto`` resolved."""
        if self.arrival != "auto":
            return self.arrival
        if self.find_knee or self.request_rate is not None:
            return "poisson"
        return "trace" if self.trace_file else "closed"

    @property
    def trace_file(self) -> str:
        """The trace to replay; empty: none."""
        return self.trace or (self.file if self.dataset == "mooncake" else "")


def parse_slos(texts: Sequence[str]) -> dict[str, float]:
    """Read ``ttft:500ms`` and the like; milliseconds by metric.

    Raises:
        ConfigError: One is of another form, or a metric is named twice.
    """
    result: dict[str, float] = {}
    for text in texts:
        match = _SLO.fullmatch(text.strip())
        if match is None or match[1] not in SLO_METRICS:
            raise ConfigError(f"--slo must look like ttft:500ms ({', '.join(SLO_METRICS)}), got {text!r}", field="slo")
        if match[1] in result:
            raise ConfigError(f"--slo {match[1]} is given twice", field="slo")
        limit = float(match[2]) * _UNITS_MS[match[3] or "ms"]
        if not 0 < limit < math.inf:
            raise ConfigError(f"--slo {match[1]} must be above 0", field="slo")
        result[match[1]] = limit
    return result
