"""Agents and tool runners, unmodified and configured by address, key and model alone: sessions of two turns with tools.

A real model answers: ``models/baton-tiny-tools``. It knows prompts of one exchange, so its copy here has a chat
template that leaves out what else agents send, and a context that takes what they ask for; it is greedy by its
``generation_config.json``.
"""

from __future__ import annotations

import getpass
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from tests.clients.conftest import Server
from tests.clients.environment import PROGRAMS, npm, python
from tests.support.servers.up import running_up

MODEL = Path(__file__).resolve().parents[2] / "models" / "baton-tiny-tools"
NAME = "baton-tiny-tools"
CALLS = [["get_weather", {"city": "Cologne"}], ["get_time", {"city": "Oslo"}]]
TEXTS = ["It says: rain.", "It says: noon."]
SESSION = {"calls": CALLS, "texts": TEXTS}
FOLDER = "dimo"
"""The working folder's name, which the first call finds out: a word that the small model can repeat."""
OBJECT = {"type": "object", "properties": {"city": {"enum": ["Cologne", "Oslo"]}}, "required": ["city", "days"]}
RUNNERS = {
    "anthropic_runner": "@anthropic-ai/sdk@1.14.0",
    "openai_runner": "openai@7.59.0",
}


@pytest.fixture(scope="module")
def tools_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("agents") / NAME
    shutil.copytree(MODEL, model)
    shutil.copy(PROGRAMS / "agents.jinja", model / "chat_template.jinja")
    for file, change in (
        ("config.json", {"max_position_embeddings": 262144}),
        ("generation_config.json", {"top_k": 1}),
    ):
        path = model / file
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    # Prompts are too short for their KV to decide: conversations stay together by the names that agents give them.
    sessions = ("--router-args", "--policy session")
    with running_up("--ratio", "2P2D", *sessions, "--model", str(model), "--served-model-name", NAME) as started:
        yield Server(started.url, NAME, str(model))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / FOLDER
    folder.mkdir()
    return folder


def said(command: str) -> str:
    """Return what the model says of a command's result: its last word."""
    return f"It says: {FOLDER if command == 'pwd' else getpass.getuser()}."


def check(server: Server, before: Any, requests: int) -> None:
    seen = server.figures() - before
    assert seen.failed == 0
    assert seen.finished >= requests


def test_codex(tools_server: Server, work: Path) -> None:
    program = npm("codex", "@openai/codex@0.171.0")
    before = tools_server.figures()
    home = {"HOME": str(work.parent), "CODEX_HOME": str(work.parent / "codex"), "CODEX_API_KEY": "unused"}
    Path(home["CODEX_HOME"]).mkdir()
    options = ("--skip-git-repo-check", "-m", NAME, "-c", f"openai_base_url={tools_server.url}/v1", "--json")
    for resume, command in (((), "pwd"), (("resume", "--last"), "whoami")):
        prompt = f"Use exec_command with cmd {command}."
        text = program.run("codex", "exec", *resume, *options, prompt, cwd=work, **home)
        print(text)
        items = [event["item"] for event in map(json.loads, text.splitlines()) if event["type"] == "item.completed"]
        calls = [item for item in items if item["type"] == "command_execution"]
        assert [(command in call["command"], call["exit_code"]) for call in calls] == [(True, 0)]
        assert [item["text"] for item in items if item["type"] == "agent_message"] == [said(command)]
    check(tools_server, before, 4)
    check_conversations(tools_server, before, 2)


def test_claude_code(tools_server: Server, work: Path) -> None:
    program = npm("claude", "@anthropic-ai/claude-code@2.1.332")
    before = tools_server.figures()
    home = {"HOME": str(work.parent), "ANTHROPIC_BASE_URL": tools_server.url, "ANTHROPIC_API_KEY": "unused"}
    for resume, command in (((), "pwd"), (("--continue",), "whoami")):
        options = ("-p", *resume, "--model", NAME, "--output-format", "stream-json", "--verbose")
        text = program.run("claude", *options, f"Bash {command}.", cwd=work, **home)
        print(text)
        events = [json.loads(line) for line in text.splitlines()]
        blocks = [block for event in events if event["type"] == "assistant" for block in event["message"]["content"]]
        assert [block["input"] for block in blocks if block["type"] == "tool_use"] == [{"command": command}]
        assert [block["text"] for block in blocks if block["type"] == "text"] == [said(command)]
    check(tools_server, before, 4)
    check_conversations(tools_server, before, 2)


def test_opencode(tools_server: Server, work: Path) -> None:
    program = npm("opencode", "opencode-ai@1.18.33")
    before = tools_server.figures()
    options = {"baseURL": f"{tools_server.url}/v1", "apiKey": "unused"}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Baton",
        "options": options,
        "models": {NAME: {"name": NAME}},
    }
    config = {"provider": {"baton": provider}, "model": f"baton/{NAME}", "small_model": f"baton/{NAME}"}
    (work / "opencode.json").write_text(json.dumps(config))
    for resume, command in (((), "pwd"), (("--continue",), "whoami")):
        words = ("opencode", "run", "--format", "json", *resume, f"Use bash to {command}.")
        text = program.run(*words, cwd=work, HOME=str(work.parent))
        print(text)
        parts = [json.loads(line)["part"] for line in text.splitlines()]
        assert [part["state"]["input"] for part in parts if part["type"] == "tool"] == [{"command": command}]
        assert [part["text"] for part in parts if part["type"] == "text"] == [said(command)]
    check(tools_server, before, 4)
    check_conversations(tools_server, before, 2)


def check_conversations(server: Server, before: Any, least: int) -> None:
    """All requests named their conversations, without a header of Baton's, and each stayed with one decode instance."""
    count = int(server.figures().finished - before.finished)
    decisions = httpx.get(f"{server.url}/debug/decisions?limit={count}").json()["decisions"]
    placed: dict[str, list[str]] = {}
    for decision in decisions:
        placed.setdefault(decision["session"], []).append(decision["decode"])
    print(placed)
    assert None not in placed
    assert max(map(len, placed.values())) >= least
    assert all(len(set(instances)) == 1 for instances in placed.values())


@pytest.mark.parametrize("name", RUNNERS)
def test_tool_runners_of_npm(tools_server: Server, name: str) -> None:
    before = tools_server.figures()
    assert npm(name, RUNNERS[name]).script(f"{name}.mjs", tools_server.url, NAME) == SESSION
    check(tools_server, before, 4)


def test_tool_runner_of_anthropic_python(tools_server: Server) -> None:
    before = tools_server.figures()
    client = python("anthropic_python", "anthropic==2.14.0")
    text = client.run("python", str(PROGRAMS / "anthropic_runner.py"), tools_server.url, NAME)
    assert json.loads(text) == SESSION
    check(tools_server, before, 4)


def test_openai_agents(tools_server: Server) -> None:
    before = tools_server.figures()
    client = python("openai_agents", "openai-agents==0.24.0")
    found = json.loads(client.run("python", str(PROGRAMS / "openai_agents.py"), tools_server.url, NAME))
    assert found == {"OpenAIResponsesModel": SESSION, "OpenAIChatCompletionsModel": SESSION}
    check(tools_server, before, 8)


def test_ai_sdk(tools_server: Server) -> None:
    before = tools_server.figures()
    packages = ("ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "@ai-sdk/openai-compatible", "zod")
    found = npm("ai_sdk_tools", *packages).script("ai_sdk_tools.mjs", tools_server.url, NAME)
    assert list(found) == ["compatible", "chat", "responses", "anthropic"]
    for session in found.values():
        jsonschema.validate(session.pop("object"), OBJECT)
        assert session == SESSION
    check(tools_server, before, 20)
