"""vLLM's own tests of its tool and reasoning parsers, unmodified from its sources, against the dialects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.clients.environment import sdist

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


def expected_failures() -> set[str]:
    """Return the tests that fail on purpose; the list says why."""
    lines = EXPECTED.read_text().splitlines()
    tests = [line for line in lines if line.strip() and not line.startswith("#")]
    assert len({*tests}) == len(tests)
    return {*tests}


@pytest.mark.parametrize("folder", FAMILIES)
def test_vllms_parser_tests_pass_but_for_those_that_fail_on_purpose(folder: str, tmp_path: Path) -> None:
    root = sdist("vllm", VERSION)
    kind = "tool" if folder == "tool_parsers" else "reasoning"
    files = [f"tests/{folder}/test_{name}_{kind}_parser.py" for name in FAMILIES[folder]]
    outcomes = tmp_path / "outcomes.json"
    # Their conftest.py of all tests, which imports an engine, is left out; there is nothing to configure either.
    options = ("-q", "-c", os.devnull, f"--rootdir={root}", f"--confcutdir=tests/{folder}", "-W", "ignore")
    done = subprocess.run(
        (sys.executable, "-m", "pytest", "-p", "adapter", "-p", "no:cacheprovider", *options, *files),
        cwd=root, capture_output=True, text=True, timeout=1800, check=False,
        env={
            **os.environ,
            "PYTHONPATH": f"{root}{os.pathsep}{SUITE}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "BATON_OUTCOMES": str(outcomes),
            "HF_HUB_OFFLINE": "1",
        },
    )  # fmt: skip
    assert done.returncode in (0, 1), f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    found = json.loads(outcomes.read_text())
    assert {test.partition("::")[0] for test in found} == {*files}
    failed = {test for test, outcome in found.items() if outcome == "failed"}
    expected = {test for test in expected_failures() if test.startswith(f"tests/{folder}/")}
    print(f"\n{folder}: {len(found) - len(failed)} of vLLM's {len(found)} tests do not fail, {len(failed)} do")
    wrong = "\n".join(sorted(failed - expected))
    assert failed <= expected, f"fail and are not in {EXPECTED.name}:\n{wrong}\n{done.stdout[-20000:]}"
    assert expected <= failed, f"are in {EXPECTED.name} and do not fail: {sorted(expected - failed)}"
