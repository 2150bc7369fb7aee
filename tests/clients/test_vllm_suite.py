"""vLLM's own tests, unmodified from its sources: of parsers against the dialects, of the API against ``baton up``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.clients.conftest import MODEL
from tests.clients.environment import sdist
from tests.support.servers.up import Running, running_up

VERSION = "0.33.0"
SUITE = Path(__file__).with_name("vllm_suite")
EXPECTED = SUITE / "expected_failures.txt"
FAMILIES = {
    "tool_parsers": (
        *("deepseekv3", "deepseekv31", "deepseekv32", "glm4_moe", "glm47_moe", "granite", "granite4", "granite_20b_fc"),
        *("hermes", "kimi_k2", "llama3_json", "llama4_pythonic", "minimax_m2", "olmo3", "pythonic", "qwen3coder"),
    ),
    "reasoning": ("deepseekr1", "deepseekv3", "glm4_moe", "kimi_k2", "minimax_m2", "olmo3", "qwen3"),
}


def expected_failures() -> tuple[set[str], set[str]]:
    """Return the tests that fail on purpose, and those whose outcome is up to chance; the list says why."""
    lines = EXPECTED.read_text().splitlines()
    tests = [line for line in lines if line.strip() and not line.startswith("#")]
    assert len({*tests}) == len(tests)
    chance = {test.removeprefix("? ") for test in tests if test.startswith("? ")}
    return {test for test in tests if not test.startswith("? ")}, chance


API = {
    "openai": ("chat_completion/test_chat_completion", "completion/test_completion", "test_return_token_ids"),
    "anthropic": ("test_messages",),
}
NAMES = ("Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-1.5B-Instruct", "claude-3-7-sonnet-latest")
"""Models that the tests ask for."""


@pytest.fixture(scope="module")
def named() -> Iterator[Running]:
    """A deployment whose model has the names that vLLM's tests use."""
    with running_up(
        "--ratio", "1P1D", "--dtype", "float32", "--model", str(MODEL), "--served-model-name", ",".join(NAMES)
    ) as started:
        yield started


@pytest.mark.parametrize("folder", FAMILIES)
def test_vllms_parser_tests_pass_but_for_those_that_fail_on_purpose(folder: str, tmp_path: Path) -> None:
    kind = "tool" if folder == "tool_parsers" else "reasoning"
    files = [f"tests/{folder}/test_{name}_{kind}_parser.py" for name in FAMILIES[folder]]
    _compare(f"tests/{folder}", files, tmp_path / "outcomes.json")


@pytest.mark.parametrize("folder", API)
def test_vllms_api_tests_pass_but_for_those_that_fail_on_purpose(folder: str, named: Running, tmp_path: Path) -> None:
    files = [f"tests/entrypoints/{folder}/{name}.py" for name in API[folder]]
    _compare("tests/entrypoints", files, tmp_path / "outcomes.json", BATON_URL=named.url)


def _compare(folder: str, files: list[str], outcomes: Path, **environment: str) -> None:
    """Run some of vLLM's tests; those that fail must be the ones that are listed.

    Args:
        folder: Folder whose ``conftest.py`` is the outermost one that is used.
        files: Files of tests.
        outcomes: Where the results are written.
        environment: More variables for the tests.
    """
    root = sdist("vllm", VERSION)
    # Their conftest.py of all tests, which imports an engine, is left out; there is nothing to configure either.
    options = ("-q", "--tb=short", "-c", os.devnull, f"--rootdir={root}", f"--confcutdir={folder}", "-W", "ignore")
    done = subprocess.run(
        (sys.executable, "-m", "pytest", "-p", "adapter", "-p", "no:cacheprovider", *options, *files),
        cwd=root, capture_output=True, text=True, timeout=1800, check=False,
        env={
            **os.environ,
            "PYTHONPATH": f"{root}{os.pathsep}{SUITE}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "BATON_OUTCOMES": str(outcomes),
            "HF_HUB_OFFLINE": "1",
            **environment,
        },
    )  # fmt: skip
    assert done.returncode in (0, 1), f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    found = json.loads(outcomes.read_text())
    assert {test.partition("::")[0] for test in found} == {*files}
    listed, chance = expected_failures()
    failed = {test for test, outcome in found.items() if outcome == "failed"} - chance
    expected = {test for test in listed if test.partition("::")[0] in files}
    print(f"\n{folder}: {len(found) - len(failed)} of vLLM's {len(found)} tests do not fail, {len(failed)} do")
    wrong = "\n".join(sorted(failed - expected))
    assert failed <= expected, f"fail and are not in {EXPECTED.name}:\n{wrong}\n{done.stdout[-40000:]}"
    assert expected <= failed, f"are in {EXPECTED.name} and do not fail: {sorted(expected - failed)}"
