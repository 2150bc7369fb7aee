"""Libraries that speak to OpenAI: what they return is what the server answers, whole and streamed."""

from __future__ import annotations

import json

import pytest
from tests.clients.conftest import Server
from tests.clients.environment import PROGRAMS, npm, python

MESSAGES = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "Write a loop."}]
PYTHON = {
    "openai_python": ("openai==3.54.0",),
    "litellm_python": ("litellm==1.106.2",),
    "langchain_python": ("langchain-openai==1.7.3",),
    "llama_index_python": ("llama-index-llms-openai-like==0.8.1",),
}
NODE = {"openai_node": ("openai",), "ai_sdk": ("ai", "@ai-sdk/openai-compatible")}


@pytest.mark.parametrize("name", [*PYTHON, *NODE])
def test_answers_are_the_servers(server: Server, name: str) -> None:
    before = server.figures()
    where = (server.url, server.model)
    if name in PYTHON:
        text = python(name, *PYTHON[name]).run("python", str(PROGRAMS / f"{name}.py"), *where)
        found = json.loads(text.splitlines()[-1])
    else:
        found = npm(name, *NODE[name]).script(f"{name}.mjs", *where)
    seen = server.figures() - before
    assert seen.failed == 0
    expected = server.chat(MESSAGES, max_tokens=24)
    assert found["chat"] == found["streamed"] == expected["choices"][0]["message"]["content"]
    assert found["usage"] == expected["usage"]["completion_tokens"]
    assert found.get("models", [server.model])[0] == server.model
    assert found.get("logprobs", found["usage"]) == found["usage"]
    assert found.get("same", True)
    if "plain" in found:
        assert found["plain"] == server.complete("import os\n", max_tokens=16)["choices"][0]["text"]
    chats = 4 if "same" in found else 2
    plain = 16 if "plain" in found else 0
    assert seen.generated_tokens == chats * found["usage"] + plain
