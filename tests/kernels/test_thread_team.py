"""Python functions in the threads of torch's operations."""

from __future__ import annotations

import threading

import pytest
import torch

from baton_kernels.cpu.library import ThreadTeam


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_thread_calls_it_once_at_the_same_time(threads: int) -> None:
    together, seen = threading.Barrier(threads, timeout=240), set[int]()

    def work() -> None:
        seen.add(threading.get_ident())
        together.wait()  # passes only when all are in it

    for _ in range(3):
        seen.clear()
        ThreadTeam(threads).run(work)
        assert len(seen) == threads
        assert threading.get_ident() in seen


@pytest.mark.parametrize("threads", [1, 2])
def test_what_the_function_raises_comes_out_once_all_have_ended(threads: int) -> None:
    ended = []

    def work() -> None:
        ended.append(threading.get_ident())
        raise ValueError("no share")

    with pytest.raises(ValueError, match="no share"):
        ThreadTeam(threads).run(work)
    assert len(ended) == threads


def test_tensors_are_computed_before_and_after() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.ones(512, 512)
        found = []
        for _ in range(5):
            ThreadTeam(2).run(lambda: found.append(1))
            assert (x @ x)[0, 0] == 512
        assert len(found) == 10
    finally:
        torch.set_num_threads(before)
