"""``make test-clients``: third-party clients, unmodified, against ``baton up``; not part of ``make test``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.servers.up import Running, running_up

MODEL = Path(__file__).resolve().parents[2] / "models" / "baton-tiny"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(2400))


@dataclass(frozen=True)
class Figures:
    """What a router counted: requests, tokens, seconds."""

    finished: float
    failed: float
    prompt_tokens: float
    generated_tokens: float
    ttft: tuple[float, float]
    itl: tuple[float, float]
    e2e: tuple[float, float]

    def __sub__(self, other: Figures) -> Figures:
        def pair(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
            return a[0] - b[0], a[1] - b[1]

        return Figures(
            self.finished - other.finished,
            self.failed - other.failed,
            self.prompt_tokens - other.prompt_tokens,
            self.generated_tokens - other.generated_tokens,
            pair(self.ttft, other.ttft),
            pair(self.itl, other.itl),
            pair(self.e2e, other.e2e),
        )

    @property
    def mean_ttft_ms(self) -> float:
        """Mean time to first token, in milliseconds."""
        return 1e3 * self.ttft[0] / self.ttft[1]

    @property
    def mean_itl_ms(self) -> float:
        """Mean time between tokens, in milliseconds."""
        return 1e3 * self.itl[0] / self.itl[1]


@dataclass(frozen=True)
class Server:
    """A deployment.

    Attributes:
        url: Of the OpenAI API, without ``/v1``.
        model: Name of its model.
        tokenizer: Folder with the model's tokenizer.
    """

    url: str
    model: str = "baton-tiny"
    tokenizer: str = str(MODEL)

    def figures(self) -> Figures:
        """Return what the router has counted so far."""
        found: dict[str, float] = {}
        failed = 0.0
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                if sample.name == "baton_request_finished_total" and sample.labels["outcome"] != "done":
                    failed += sample.value
                elif not sample.labels or sample.labels.get("outcome") == "done":
                    found[sample.name] = sample.value

        def pair(name: str) -> tuple[float, float]:
            return found[f"{name}_sum"], found[f"{name}_count"]

        return Figures(
            found.get("baton_request_finished_total", 0.0),
            failed,
            found["baton_request_prompt_tokens_total"],
            found["baton_request_generated_tokens_total"],
            pair("baton_request_ttft_seconds"),
            pair("baton_request_itl_seconds"),
            pair("baton_request_e2e_seconds"),
        )

    def complete(self, prompt: str, **options: Any) -> dict[str, Any]:
        """Ask ``/v1/completions`` directly."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **options}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """Ask ``/v1/chat/completions`` directly."""
        body = {"model": self.model, "messages": messages, "temperature": 0, **options}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    with running_up(
        "--ratio", "1P1D", "--dtype", "float32", "--model", str(MODEL), "--decode-args", "--remote-prefill-threshold 32"
    ) as started:
        yield started


@pytest.fixture(scope="session")
def server(running: Running) -> Server:
    return Server(running.url)


def compared(name: str, **rows: tuple[float, float]) -> None:
    """Print what a client reports beside what the server counted."""
    print(f"\n{name}: " + ", ".join(f"{what} {a:.6g} (server {b:.6g})" for what, (a, b) in rows.items()))
