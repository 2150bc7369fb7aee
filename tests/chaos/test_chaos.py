"""A few seeds of ``make chaos``, in a process of their own as there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.chaos.workload import ROOT
from tests.support.child_env import child_env
from tests.support.servers.redis_server import missing_redis

pytest.importorskip("redis")
pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(900)]

FIRST = int(os.environ.get("BATON_TEST_CHAOS_SEED") or 1_000_000)
"""The same each time; others by this variable, or, by the thousand, by ``make chaos SEEDS=``."""


@pytest.mark.skipif(missing_redis() is not None, reason=missing_redis() or "")
def test_every_answer_is_right_and_nothing_is_left_whatever_breaks():
    command = [sys.executable, "-m", "tests.chaos.run", "--seeds", f"{FIRST}-{FIRST + 99}"]
    bounds = ["--limit-s", "25", "--longest-s", "3"]
    done = subprocess.run([*command, *bounds], cwd=ROOT, env=child_env(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["count"] > 0
    assert not record["failed"]
    assert record["requests"]["answered"] > 0
