"""``baton up -f``: every example of a deployment, started and asked."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.support.equality import hf_greedy
from tests.support.servers.up import running_up

import baton
from baton.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
INSTANCES = {
    "cluster-2p2d": {"prefill-0", "prefill-1", "decode-0", "decode-1"},
    "cluster-pools": {"prefill-0", "decode-0", "decode-staged-0"},
    "cluster-colocated": {"decode-0", "decode-1"},
}
PROMPT = "import os\n\n\ndef main():\n    print(os.environ)\n" * 4


@pytest.mark.parametrize("name", INSTANCES)
def test_examples_serve(name, model):
    with running_up("-f", f"examples/{name}.yaml", "--model", model) as running:
        with baton.Client(running.grpc) as client:
            assert {each.instance_id for each in client.list_instances() if each.healthy} == INSTANCES[name]
            answer = client.generate(PROMPT, max_tokens=12, temperature=0)
        ids = Tokenizer.load(model).encode(PROMPT)
        assert answer.token_ids == hf_greedy(model, [ids], 12)[0]
        assert httpx.get(f"{running.url}/health", timeout=240).status_code == 200


def test_every_example_has_a_test():
    assert {path.stem for path in Path("examples").glob("cluster-*.yaml")} == set(INSTANCES)
