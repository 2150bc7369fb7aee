"""Captured decode steps: which size runs a batch, what rows beyond it do, and that nothing of a step before is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from baton.config import EngineConfig
from baton.engine.device import ComputeDevice, HostStaging
from baton.engine.runner.decode_graphs import CallRecorder, DecodeGraphs, Replay, TableShape, graph_bytes
from baton.engine.runner.input_batch import ForwardBatch
from baton.errors import ConfigError
from baton_kernels.paged_attention import TokenTrees

DEVICE = ComputeDevice(torch.device("cpu"), on_gpu=True)
BLOCK, GROUPS, WIDTH = 4, 2, 6
SHAPE = TableShape(BLOCK, GROUPS, WIDTH)


class Attention:
    """Knows a decode step by the tensors that it reads."""

    name = "seen"

    def prepare(self, batch: Any) -> Any:
        raise AssertionError("a captured step is not prepared again")

    def run(self, *_: Any) -> torch.Tensor:
        raise AssertionError

    def prepare_decodes(
        self, context_lens: torch.Tensor, tables: torch.Tensor, block_size: int, groups: int, tokens: int = 1
    ) -> Any:
        assert (block_size, groups, tables.shape[1]) == (BLOCK, GROUPS, GROUPS * WIDTH)
        return context_lens, tables


class Recorder(CallRecorder):
    """Counts replays by size."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def capture(self, call: Replay) -> Replay:
        replay = super().capture(call)

        def counted() -> torch.Tensor:
            out = replay()
            self.replays.append(len(out))
            return out

        return counted


def model(tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, plan: Any) -> torch.Tensor:
    """Logits that name all that a row has: token, position, length, and the blocks that its length reaches."""
    lens, tables = plan
    groups = tables.view(len(lens), GROUPS, WIDTH)
    there = torch.arange(WIDTH)[None] < -(-lens[:, None] // BLOCK)
    weights = torch.arange(1, GROUPS * WIDTH + 1).view(GROUPS, WIDTH)
    blocks = (groups * there[:, None] * weights).sum((1, 2))
    each = len(tokens) // len(lens)
    lens, blocks = (part.long().repeat_interleave(each) for part in (lens, blocks))
    return torch.stack([tokens, positions, lens, blocks], dim=1)[rows].float()


def graphs_of(*sizes: int) -> tuple[DecodeGraphs, Recorder]:
    recorder = Recorder()
    graphs = DecodeGraphs(DEVICE, model, Attention(), SHAPE, HostStaging(DEVICE), recorder)
    for size in sizes:
        graphs.capture(size)
    recorder.replays.clear()
    return graphs, recorder


def batch_of(lens: list[int], *, used: int | None = None) -> tuple[ForwardBatch, np.ndarray]:
    count, rng = len(lens), np.random.default_rng(lens)
    contexts = np.array(lens, np.int32)
    width = used or max(-(-each // BLOCK) for each in lens)
    tables = rng.integers(0, 90, (count, GROUPS * width)).astype(np.int32)
    forward = ForwardBatch(
        rng.integers(0, 500, count),
        contexts.astype(np.int64) - 1,
        np.arange(count + 1, dtype=np.int32),
        contexts,
        tables,
        np.arange(count),
        groups=GROUPS,
    )
    return forward, tables


def expected(batch: ForwardBatch, tables: np.ndarray) -> torch.Tensor:
    wide = np.zeros((len(tables), GROUPS, WIDTH), np.int32)
    wide[..., : tables.shape[1] // GROUPS] = tables.reshape(len(tables), GROUPS, -1)[..., :WIDTH]
    plan = torch.from_numpy(batch.context_lens), torch.from_numpy(wide.reshape(len(tables), -1))
    return model(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions), torch.arange(len(tables)), plan)


def test_each_batch_runs_at_the_next_larger_size_with_its_own_numbers() -> None:
    graphs, recorder = graphs_of(8, 1, 2, 4)
    assert graphs.sizes == [1, 2, 4, 8]
    lens = [[5], [24, 1, 9], [1, 1], [17, 3, 8, 2, 11], [2, 2, 2, 2], [24], [1] * 8]
    for each in lens:
        batch, tables = batch_of(each)
        assert graphs.can_run(batch)
        assert torch.equal(graphs.run(batch, tables), expected(batch, tables)), each
    assert recorder.replays == [1, 4, 2, 8, 4, 1, 8]


def test_rows_beyond_the_batch_have_no_length_whatever_was_there_before() -> None:
    graphs, _ = graphs_of(4)
    graphs.run(*batch_of([24, 24, 24, 24]))
    seen: list[torch.Tensor] = []
    step, replay = graphs._steps[1, 4]
    graphs._steps[1, 4] = step, lambda: seen.append(replay()) or seen[-1]  # type: ignore[func-returns-value]
    graphs.run(*batch_of([7]))
    assert seen[0][1:].tolist() == [[0.0] * 4] * 3


def test_tokens_that_the_step_before_chose_are_taken_from_where_it_put_them() -> None:
    graphs, _ = graphs_of(4)
    batch, tables = batch_of([24, 3, 9])
    known = batch.token_ids.copy()
    batch.token_ids[:] = [-2, known[1], -1]
    chosen = torch.tensor([known[2], known[0]])
    got = graphs.run(replace(batch, chosen=chosen), tables)
    batch.token_ids[:] = known
    assert torch.equal(got, expected(batch, tables))


def test_steps_that_verify_as_many_drafts_of_each_sequence_are_replayed() -> None:
    graphs, recorder = graphs_of(2, 4)
    graphs.capture(4, 3)
    recorder.replays.clear()
    plain, tables = batch_of([24, 3, 9])
    starts = np.arange(4, dtype=np.int32) * 3
    places = (plain.positions[:, None] - np.array([2, 1, 0])).reshape(-1)
    wide = replace(plain, token_ids=np.arange(9), positions=places, query_starts=starts, logit_rows=np.arange(9))
    assert graphs.can_run(wide)
    got = graphs.run(wide, tables)
    assert got[:, :2].tolist() == np.stack([wide.token_ids, places], 1).tolist()
    assert got[::3, 2:].tolist() == graphs.run(plain, tables)[:, 2:].tolist()
    assert recorder.replays == [12, 4]
    mixed = replace(wide, query_starts=np.array([0, 4, 6, 9], np.int32))
    trees = replace(wide, trees=TokenTrees(np.ones(9, np.uint64), plain.context_lens))
    some = replace(wide, logit_rows=np.arange(8))
    assert not any(map(graphs.can_run, (mixed, trees, some)))


def test_wider_tables_than_the_longest_sequence_needs_are_cut() -> None:
    graphs, _ = graphs_of(2)
    batch, tables = batch_of([24, 3], used=WIDTH + 2)
    assert torch.equal(graphs.run(batch, tables), expected(batch, tables))


def test_other_steps_are_not_taken() -> None:
    graphs, _ = graphs_of(2)
    good, _ = batch_of([5, 6])
    assert graphs.can_run(good)
    assert not graphs.can_run(batch_of([1, 2, 3])[0])
    assert not graphs.can_run(batch_of([WIDTH * BLOCK + 1])[0])
    prompt = ForwardBatch(
        np.arange(5), np.arange(5), np.array([0, 5], np.int32), np.array([5], np.int32), good.block_tables[:1],
        np.array([4]),
    )  # fmt: skip
    assert not graphs.can_run(prompt)
    hidden = ForwardBatch(*(getattr(good, name) for name in list(good.__slots__)[:6]), hidden_of=(-1,))
    assert not graphs.can_run(hidden)


def test_a_replay_that_gives_other_logits_is_refused() -> None:
    class Wrong(CallRecorder):
        def capture(self, call: Replay) -> Replay:
            replay = super().capture(call)
            return lambda: replay() * 1.5

    graphs = DecodeGraphs(DEVICE, model, Attention(), SHAPE, HostStaging(DEVICE), Wrong())
    with pytest.raises(RuntimeError, match="3 sequences differs"):
        graphs.capture(3)
    assert graphs.sizes == []


def test_memory_of_all_sizes_is_the_largest_and_as_much_as_each_further_takes() -> None:
    graphs, _ = graphs_of()
    left = iter([1000, 700, 690])
    assert graph_bytes(graphs, [1, 2, 4, 8], lambda: next(left)) == 300 + 10 * 3


def test_host_staging_keeps_nothing_of_arrays_that_change_afterwards() -> None:
    staging = HostStaging(DEVICE)
    arrays = np.arange(7), np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros(0, np.int64)
    for turn in range(5):
        arrays[0][:] += turn
        wanted = [array.copy() for array in arrays]
        got = staging.upload(*arrays)
        arrays[1][:] += 1
        staging.upload(arrays[1])
        assert all(np.array_equal(tensor.numpy(), array) for tensor, array in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("flag", "sizes"),
    [(("on",), [1, 2, 4, 8, 16, 20]), (("off",), []), (("3", "64", "1"), [1, 3, 20])],
)
def test_sizes_by_flag(flag: tuple[str, ...], sizes: list[int]) -> None:
    config = EngineConfig(device="cuda:0", max_num_seqs=20, cuda_graphs=flag)
    assert config.graph_sizes == sizes
    assert EngineConfig(cuda_graphs=flag).graph_sizes == []


@pytest.mark.parametrize("flag", [(), ("on", "8"), ("0",), ("eight",), ("-1",)])
def test_malformed_sizes_are_refused(flag: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(cuda_graphs=flag)
    assert caught.value.field == "cuda_graphs"
