"""A short, seeded run of every target of ``make fuzz``, and of every input that one once failed on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fuzz import event_loops, native_targets, python_targets

CRASHES = Path(__file__).with_name("crashes")
INPUTS = 150
SECONDS = 5
"""Processor time per target of native code."""


def crashes(target: str) -> list[Path]:
    return sorted((CRASHES / target).glob("*"))


@pytest.fixture(scope="session")  # a worker may come back to this module
def kept() -> Iterator[None]:
    with event_loops.KEPT:
        yield


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("target", python_targets.TARGETS)
def test_what_reads_foreign_bytes(target: str) -> None:
    run = python_targets.load(target)
    for path in crashes(target):
        run(path.read_bytes())
    draw = random.Random(target)
    for _ in range(INPUTS):
        few = draw.choice([4, 256])  # of few values, or of all
        run(bytes(draw.randrange(few) for _ in range(draw.randrange(draw.choice([40, 400])))))


@pytest.fixture(scope="module")
def programs() -> dict[str, Path]:
    try:
        return native_targets.build(native_targets.TARGETS, guided=False)
    except native_targets.NoCompilerError as error:
        pytest.skip(str(error))


@pytest.mark.timeout(1200)  # the first one compiles
@pytest.mark.parametrize("target", native_targets.TARGETS)
def test_native_code_under_sanitizers(programs: dict[str, Path], target: str) -> None:
    done = native_targets.run([str(programs[target]), "--seconds", str(SECONDS), *map(str, crashes(target))])
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"replayed {len(crashes(target))} files" in done.stdout
