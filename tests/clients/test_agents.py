"""Libraries of agents: the scripts of ``examples/``, each with its package as it installs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.clients.conftest import Server
from tests.clients.environment import python
from tests.clients.test_libraries import PYTHON

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PACKAGES = {
    "instructor_extract": ("instructor==1.17.0",),
    "pydantic_ai_agent": ("pydantic-ai-slim[openai]==2.68.0",),
    "langchain_agent": PYTHON["langchain_python"],
    "llama_index_agent": PYTHON["llama_index_python"],
}
ENVIRONMENTS = {"langchain_agent": "langchain_python", "llama_index_agent": "llama_index_python"}
CITY = {"enum": ["Cologne", "Rome", "Oslo"]}
REPORT = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 7}, "rain": {"type": "boolean"}},
    "required": ["city", "days", "rain"],
}
CALL = {"type": "object", "properties": {"city": CITY, "days": {"enum": [1, 2, 3]}}, "required": ["city", "days"]}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_example_runs(server: Server, name: str) -> None:
    before = server.figures()
    url = f"{server.url}/v1"
    environment = python(ENVIRONMENTS.get(name, name), *PACKAGES[name])
    text = environment.run("python", str(EXAMPLES / f"{name}.py"), "--url", url)
    steps: dict[str, Any] = {line.pop("step"): line for line in map(json.loads, text.splitlines())}
    print(f"\n{name}: {steps}")
    expected = {
        "instructor_extract": ["tools", "json_schema", "partial"],
        "pydantic_ai_agent": ["tool", "native", "agent"],
        "langchain_agent": ["tool", "stream", "json_schema", "function_calling"],
        "llama_index_agent": ["tool", "structured", "stream"],
    }
    assert list(steps) == expected[name]
    for step in steps.values():
        if step.get("value") is not None:
            jsonschema.validate(step["value"], REPORT)
        if "arguments" in step:
            jsonschema.validate(step["arguments"], CALL)
        assert step.get("parts", 2) > 1
    assert steps.get("agent", {"called": ["x"]})["called"] or steps["agent"]["value"]
    seen = server.figures() - before
    assert seen.failed == 0
    assert seen.finished >= len(steps)
