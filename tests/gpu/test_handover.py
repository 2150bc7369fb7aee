"""Prefill and decode in two processes on one GPU: KV goes from pool to pool on the device, over CUDA IPC."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tests.support.equality import ARCHITECTURES, References, mixed_prompts
from tests.support.transport.device_pair import ask, device_pair

from baton.client import AsyncClient
from baton.engine.device import compute_device
from baton.engine.device_memory import DeviceArena
from baton.kv_transfer.pipes.nixl_agent import device_obstacle, nixl_obstacle
from baton.types import PrefillPath

VOCAB, NEW_TOKENS = 512, 16
FLAGS = ("--kv-blocks", "1500", "--max-num-seqs", "16", "--prefill-chunk", "64")

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_the_tokens_are_those_of_generate(references: References, architecture: str, graphs: str) -> None:
    prompts = mixed_prompts(2, VOCAB, count=16, longest=300)
    expected = references.greedy(architecture, prompts, NEW_TOKENS)
    async with device_pair(
        references.checkpoint(architecture), "cuda:0", *FLAGS, "--cuda-graphs", graphs
    ) as supervisor:
        results = await ask(supervisor, prompts, NEW_TOKENS, 120.0)
    assert [each.token_ids for each in results] == expected
    traces = [each.trace for each in results if each.trace is not None]
    remote = [trace for trace in traces if trace.path is PrefillPath.REMOTE]
    assert len(remote) > len(prompts) // 2
    assert {trace.pipe for trace in remote} == {"cuda_ipc"}


@pytest.mark.parametrize("pipe", ["tcp"])
async def test_blocks_travel_through_host_memory_too(references: References, pipe: str) -> None:
    prompts = mixed_prompts(6, VOCAB, count=8, longest=200)
    expected = references.greedy("llama", prompts, NEW_TOKENS)
    async with device_pair(references.checkpoint("llama"), "cuda:0", *FLAGS, pipes=pipe) as supervisor:
        results = await ask(supervisor, prompts, NEW_TOKENS, 120.0)
    assert [each.token_ids for each in results] == expected
    assert {each.trace.pipe for each in results if each.trace is not None and each.trace.pipe} == {pipe}


async def test_nixl_reads_device_memory_where_it_can_register_it(references: References) -> None:
    if why := nixl_obstacle() or device_obstacle(DeviceArena(compute_device("cuda:0"), 4, 4096)):
        pytest.skip(why)
    prompts = mixed_prompts(6, VOCAB, count=8, longest=200)
    expected = references.greedy("llama", prompts, NEW_TOKENS)
    async with device_pair(references.checkpoint("llama"), "cuda:0", *FLAGS, pipes="nixl") as supervisor:
        results = await ask(supervisor, prompts, NEW_TOKENS, 120.0)
    assert [each.token_ids for each in results] == expected
    assert {each.trace.pipe for each in results if each.trace is not None and each.trace.pipe} == {"nixl"}


async def test_a_killed_prefill_instance_costs_no_answer_and_no_memory(references: References) -> None:
    """Its memory was open in the decode instance: requests go on there, and the device gets all of it back."""
    prompts = mixed_prompts(8, VOCAB, count=24, longest=300)
    expected = references.greedy("llama", prompts, NEW_TOKENS)
    before = torch.cuda.mem_get_info(0)[0]
    async with (
        device_pair(references.checkpoint("llama"), "cuda:0", *FLAGS) as supervisor,
        AsyncClient(supervisor.plan.grpc_address, timeout=120.0, retries=2) as client,
    ):
        warm = await client.generate(prompts[0], temperature=0.0, max_tokens=NEW_TOKENS)
        assert warm.token_ids == expected[0]
        calls = [
            asyncio.ensure_future(client.generate(prompt, temperature=0.0, max_tokens=NEW_TOKENS)) for prompt in prompts
        ]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        supervisor.kill("prefill-0")
        results = await asyncio.gather(*calls)
    assert [each.token_ids for each in results] == expected
    async with asyncio.timeout(240):
        while torch.cuda.mem_get_info(0)[0] < before - (64 << 20):
            await asyncio.sleep(0.1)
