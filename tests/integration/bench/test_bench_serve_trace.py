"""``baton bench serve --trace`` against a real 1P1D: what its instances compute is what the simulator says they do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from baton.cli.main import main
from baton_bench.router import LLAMA_70B
from baton_bench.simulator.profile import Limits
from baton_bench.simulator.simulation import Deployment, Simulation
from baton_bench.traces import TraceRequest, read_trace, scaled, scaled_block, write_trace
from baton_bench.tuning import deployment

SCALE = 1 / 32
"""Blocks of 512 tokens have 16, as those of the engine."""
SHARED = tuple(range(10))
TURNS = (
    (*SHARED, 100),  # a conversation begins
    (*SHARED, 100, 101, 102),  # and grows by less than the threshold: decode computes that
    (*SHARED, *range(200, 212)),  # its context is rewritten behind the system prompt
    (*SHARED, *range(200, 212), 212),
    (*SHARED[:3], *range(300, 320)),
)


def agent(prompts: tuple[tuple[int, ...], ...]) -> list[TraceRequest]:
    """Return the requests of one session, each after the answer to the one before; the last block is not full."""
    return [
        TraceRequest(1000.0 * at, 512 * len(names) - 200, 160, names, "agent", 1.0) for at, names in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("deployment") / "1P1D.yaml"
    flags = {"dtype": "float32", "kv-blocks": 400}
    router = {"policy": "round_robin"}  # prefill computes what is missing, whatever that takes
    file.write_text(json.dumps({"ratio": "1P1D", "worker": {"flags": flags}, "router": {"flags": router}}))
    with deployment(file) as address:
        yield address


def test_real_instances_compute_what_the_simulator_says(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = tmp_path / "agent.jsonl"
    write_trace(trace, agent(TURNS))
    flags = ["--url", url, "--trace", str(trace), "--scale", str(SCALE), "--vocab-size", "4000", "--json", "--details"]
    assert main(["bench", "serve", *flags]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    requests = [each for each in records if each["record"] == "request"]
    (load,) = (each for each in records if each["record"] == "serve")
    assert (load["completed"], load["failed"], load["peak_concurrency"]) == (len(TURNS), 0, 1), "one after the other"

    engine = dataclasses.replace(LLAMA_70B.engines[0], kv_tokens=400 * 16)
    fleet = Deployment(1, 1, engine, engine, Limits(), LLAMA_70B.link, 6, 3072.0, policy="round_robin")
    fleet = dataclasses.replace(fleet, block_tokens=scaled_block(SCALE))
    outcome = Simulation(fleet).run(scaled(read_trace(trace), SCALE), closed=True)
    simulated = sorted(outcome.requests, key=lambda each: each.number)

    assert [each["prompt_tokens"] for each in requests] == [16 * len(names) - 6 for names in TURNS]
    assert [each["output_tokens"] for each in requests] == [5] * len(TURNS)
    computed = [each["prompt_tokens"] - each["cached_tokens"] for each in requests]
    assert computed == [each.computed for each in simulated]
    assert [each.remote for each in simulated] == [True, False, True, False, True]
