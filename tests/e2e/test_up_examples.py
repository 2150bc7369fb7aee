"""Every script under ``examples/sdk``, and each Python block of some documents, runs against ``baton up``."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.servers.up import Running

pytestmark = pytest.mark.slow
SCRIPTS = sorted(Path("examples/sdk").glob("*.py"))


def chat(out: str) -> None:
    shares = [(int(a), int(b)) for a, b in re.findall(r"\((\d+) of (\d+) prompt tokens were cached\)", out)]
    assert len(shares) == 2
    assert shares[1][0] > 0  # the conversation so far


def batch(out: str) -> None:
    lines = out.splitlines()
    assert len(lines) == 25
    assert lines[-1] == "0 failed"


def rag(out: str) -> None:
    found = [(int(a), int(b)) for a, b in re.findall(r": (\d+) of (\d+) prompt tokens cached", out)]
    assert len(found) == 6
    for first in (0, 3):
        assert all(cached > 0.5 * total for cached, total in found[first + 1 : first + 3])


def direct(out: str) -> None:
    assert out.splitlines()[-1] == "from decode-0"


def structured(out: str) -> None:
    value = json.loads(out.splitlines()[0])
    assert set(value) == {"name", "arguments"}
    assert 0 <= value["arguments"] <= 9
    assert "stop Function" in out or "stop name=" in out


CHECKS: dict[str, Callable[[str], None]] = {
    "batch": batch, "chat": chat, "direct": direct, "rag": rag, "structured": structured,
}  # fmt: skip


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_example(path, up, capsys):
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(up.grpc)
    CHECKS[path.stem](capsys.readouterr().out)


def test_every_example_is_checked():
    assert {path.stem for path in SCRIPTS} == set(CHECKS)


FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = {
    "README.md": ("from openai import", "with baton.Client("),
    "docs/index.md": ("with LLM(",),
    "docs/sdk.md": ("with baton.Client(", "baton.AsyncClient(", "baton.Client([", "FakeRouter("),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_python_of_the_documents_runs_as_it_stands(name: str, up: Running, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = FENCE.findall(Path(name).read_text(encoding="utf-8"))
    assert len(blocks) == len(BLOCKS[name])
    names: dict[str, object] = {"__name__": "__main__"}
    for block, what in zip(blocks, BLOCKS[name], strict=True):
        assert what in block
        here = block.replace("127.0.0.1:8001", up.grpc).replace("http://127.0.0.1:8000", up.url)
        exec(compile(here, name, "exec"), names)
        if "print(" in block:
            assert capsys.readouterr().out.strip()
