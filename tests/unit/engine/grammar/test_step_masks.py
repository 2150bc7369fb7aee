"""Masks by a thread beside the forward pass, and by the threads of the forward pass before it: the same."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.scripted import TINY

from baton.config import EngineConfig
from baton.engine.grammar.constraint import BannedTokens, Constraint, GrammarCompiler, MaskRow, StepMasks
from baton.engine.grammar.guidance import GuidanceBackend
from baton.engine.sampler import cpu_sampler, crowded_team
from baton.grammar import StructuredOutputs
from baton_kernels.cpu.library import ThreadTeam
from baton_kernels.token_mask import TokenMask, unpack_mask

ENDS = frozenset({0})
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}}}
TEAMS = [pytest.param(0, id="beside"), pytest.param(1, id="alone"), pytest.param(2, id="team")]


@pytest.fixture(scope="module")
def backend() -> GuidanceBackend:
    return GuidanceBackend(TINY, vocab_size=4096, eos_token_ids=ENDS)


def make_masks(backend: GuidanceBackend, threads: int) -> StepMasks:
    return StepMasks(backend, 4096, ThreadTeam(threads) if threads else None)


def make_rows(backend: GuidanceBackend) -> list[Constraint]:
    compiler = GrammarCompiler(backend, ENDS)
    grammars = [
        StructuredOutputs(json=SCHEMA).to_grammar(),
        StructuredOutputs(regex="[a-z]{3,40}").to_grammar(),
        # Does not start: all but the end is allowed.
        dataclasses.replace(StructuredOutputs(regex="[a-z]{2}").to_grammar(), start_token_ids=(17, 17)),
        StructuredOutputs(choice=["yes", "no"]).to_grammar(),
    ]
    return [compiler.constraint(each) for each in grammars for _ in range(3)]


def walk(masks: StepMasks, rows: list[Constraint]) -> list[npt.NDArray[np.bool_]]:
    """Take random tokens that masks allow, the end only where nothing else is; return all masks."""
    rng, found, banned = np.random.default_rng(7), [], BannedTokens(ENDS)
    for _ in range(12):
        taken: list[TokenMask] = masks.end(masks.begin([MaskRow(one, banned) for one in rows]))
        for one, mask in zip(rows, taken, strict=True):
            found.append(unpack_mask(mask, 4096).copy())
            one.append(int(rng.choice(np.flatnonzero(found[-1]))))
            assert not one.error
    return found


@pytest.mark.parametrize("threads", [1, 2])
def test_a_team_computes_what_a_thread_does(backend: GuidanceBackend, threads: int) -> None:
    expected = walk(make_masks(backend, 0), make_rows(backend))
    masks = make_masks(backend, threads)
    found = walk(masks, make_rows(backend))
    assert np.array_equal(found, expected)
    assert masks.masks == 12 * 9
    assert masks.come_late
    assert masks.mask_wait_seconds > 0  # which is all of it


@pytest.mark.parametrize("threads", TEAMS)
def test_a_mask_that_fails_fails_its_step_and_not_the_next(
    backend: GuidanceBackend, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    masks, rows = make_masks(backend, threads), make_rows(backend)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise MemoryError("no room for a mask")

        patch.setattr(backend, "fill_mask", fail)
        patch.setattr(backend, "fill_masks", fail)
        pending = masks.begin([MaskRow(one) for one in rows])
        with pytest.raises(MemoryError, match="no room"):
            masks.end(pending)
    found = masks.end(masks.begin([MaskRow(one) for one in rows]))
    assert all(mask.any() for mask in found)


def test_threads_share_the_forward_pass_where_it_has_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu_sampler() is None:
        pytest.skip("the operators are not built")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    team = crowded_team(EngineConfig(threads=4))
    assert team is not None
    assert team.threads == 4
    divided = crowded_team(EngineConfig(threads=2, tp=2, executor="multiprocess"))
    assert divided is not None
    assert divided.threads == 2
    assert crowded_team(EngineConfig(threads=3)) is None
    assert crowded_team(EngineConfig(threads=4, device="cuda")) is None


def test_tokens_that_are_looked_at_together_leave_masks_as_they_are(backend: GuidanceBackend) -> None:
    alone = GuidanceBackend(TINY, vocab_size=4096, eos_token_ids=ENDS)
    alone._tokenizer = alone._tokenizer.with_slices([])
    expected = walk(make_masks(alone, 0), make_rows(alone))
    assert np.array_equal(walk(make_masks(backend, 0), make_rows(backend)), expected)
