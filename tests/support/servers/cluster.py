"""Instances inside one process: real engines, gRPC and pipes, without the start-up time of processes."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from baton.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.engine.core import EngineCore
from baton.engine.runner.input_batch import ForwardOutput
from baton.kv_transfer.blocks import MemoryNetwork
from baton.rpc.channel import open_channel
from baton.rpc.convert import finish_from_pb, sampling_to_pb
from baton.token_ids import pack_ids
from baton.types import FinishReason, Role, SamplingParams
from baton.worker.instance import WorkerInstance

_SETTLE_S = 240.0
_SLOW_STEP_S = 0.05


@dataclass
class Result:
    """What a decode instance answered to one request of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    trace: common_pb2.RequestTrace = field(default_factory=common_pb2.RequestTrace)


class LocalCluster:
    """Prefill and decode instances in this process; no router.

    Args:
        engine_config: Of every instance.
        config: Of every instance; ports are always free ones.
        num_prefill: Prefill instances, over all ``pipes``.
        decode_pipes: One decode instance per entry, with the pipes it may use.
        decode_changes: What differs in the decode instances' engines.
    """

    def __init__(
        self,
        engine_config: EngineConfig,
        config: WorkerConfig | None = None,
        *,
        num_prefill: int = 1,
        decode_pipes: Sequence[tuple[str, ...]] = (("shm",),),
        decode_changes: dict[str, object] | None = None,
    ) -> None:
        memory = MemoryNetwork()
        base = config or WorkerConfig()
        kinds = tuple(dict.fromkeys(kind for pipes in decode_pipes for kind in pipes))
        self.prefill = [
            WorkerInstance(
                Role.PREFILL,
                dataclasses.replace(base, instance_id=f"prefill-{i}", pipes=kinds),
                engine_config,
                memory=memory,
            )
            for i in range(num_prefill)
        ]
        decode_config = dataclasses.replace(engine_config, **(decode_changes or {}))  # type: ignore[arg-type]
        self.decode = [
            WorkerInstance(
                Role.DECODE,
                dataclasses.replace(base, instance_id=f"decode-{i}", pipes=pipes),
                decode_config,
                memory=memory,
            )
            for i, pipes in enumerate(decode_pipes)
        ]

    async def __aenter__(self) -> Self:
        started: list[WorkerInstance] = []
        try:
            for instance in (*self.prefill, *self.decode):
                await instance.start()
                started.append(instance)
        except BaseException:
            for instance in started:
                await instance.stop(0)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for instance in (*self.decode, *self.prefill):
            await instance.stop(0)

    @property
    def candidates(self) -> list[str]:
        """Addresses of the prefill instances."""
        return [instance.address for instance in self.prefill]

    async def check_handed_over(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, expected: Sequence[Sequence[int]], pipe: str
    ) -> None:
        """Generate on the first decode instance: the tokens are right, and each prompt's KV came over this pipe."""
        for prompt, tokens in zip(prompts, expected, strict=True):
            result = await self.generate(self.decode[0], prompt, sampling)
            assert result.token_ids == tokens
            assert result.trace.path == common_pb2.PREFILL_PATH_REMOTE
            assert result.trace.pipe == pipe
            assert not result.trace.failed_prefills

    async def generate(
        self,
        decode: WorkerInstance,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        candidates: Sequence[str] | None = None,
        threshold: int | None = 1,
        output: Sequence[int] = (),
        prefilled: worker_pb2.PrefilledPrompt | None = None,
    ) -> Result:
        """Run one request of one sequence to its end.

        Args:
            decode: Who owns it.
            prompt: Token ids.
            sampling: How tokens are chosen.
            candidates: Prefill instances; default: all of the cluster.
            threshold: Missing tokens from which the prefill is remote.
            output: Tokens generated before, elsewhere.
            prefilled: Where the prompt's KV waits already.
        """
        request = worker_pb2.GenerateRequest(
            request_id=secrets.token_hex(8),
            prompt_token_ids=pack_ids(prompt),
            output_token_ids=output,
            sampling=sampling_to_pb(sampling),
            prefill_candidates=self.candidates if candidates is None else candidates,
            remote_prefill_threshold=threshold,
            prefilled=prefilled,
        )
        result = Result()
        async with open_channel(decode.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            async for response in stub.Generate(request):
                for delta in response.deltas:
                    result.token_ids += delta.token_ids
                    result.finish_reason = finish_from_pb(delta.finish_reason) or result.finish_reason
                if response.HasField("trace"):
                    result.trace.CopyFrom(response.trace)
        return result

    async def prefill_first(
        self, prefill: WorkerInstance, prompt: Sequence[int], sampling: SamplingParams, request_id: str = ""
    ) -> worker_pb2.PrefilledPrompt:
        """Have a prefill instance compute a prompt, and return what a decode instance is told of it."""
        request = worker_pb2.PrefillFirstRequest(
            request_id=request_id or secrets.token_hex(8),
            prompt_token_ids=pack_ids(prompt),
            sampling=sampling_to_pb(sampling),
        )
        async with open_channel(prefill.address) as channel:
            response = await worker_pb2_grpc.WorkerServiceStub(channel).PrefillFirst(request)
        return worker_pb2.PrefilledPrompt(address=prefill.address, key=response.key)

    async def settle(self) -> None:
        """Wait until nothing is loaded, saved or kept for anybody any more.

        Raises:
            TimeoutError: It takes too long.
        """
        async with asyncio.timeout(_SETTLE_S):
            for instance in (*self.prefill, *self.decode):
                while await instance.context.engine.call(partial(_connector_pending, instance.context.engine.core)):
                    await asyncio.sleep(0.01)

    async def check_integrity(self) -> None:
        """Wait for what is still saved, and for the end of what a client left, then check that every pool adds up.

        Raises:
            AssertionError: A block leaked, is owned twice, or is held for somebody.
        """
        await self.settle()
        for instance in (*self.prefill, *self.decode):
            engine = instance.context.engine
            stats = await engine.call(engine.core.stats)
            try:
                async with asyncio.timeout(_SETTLE_S):
                    while stats.blocks_active or stats.num_running or stats.num_waiting or stats.num_loading:
                        await asyncio.sleep(0.01)
                        stats = await engine.call(engine.core.stats)
            except TimeoutError as error:
                raise AssertionError(f"{instance.context.base.instance_id} is not idle: {stats}") from error
            await engine.call(engine.core.check_integrity)


def slow_steps(*instances: WorkerInstance) -> threading.Event:
    """Have every step of some instances take 50 ms, as long as the event that is returned is set.

    So no request of some hundred tokens comes to its own end while a test looks at it, on a busy machine either.
    """
    slow = threading.Event()
    slow.set()

    def slowed(forward: Callable[..., ForwardOutput]) -> Callable[..., ForwardOutput]:
        def forward_slowly(*args: Any, **kwargs: Any) -> ForwardOutput:
            if slow.is_set():
                time.sleep(_SLOW_STEP_S)
            return forward(*args, **kwargs)

        return forward_slowly

    for instance in instances:
        executor: Any = instance.context.base.model.executor
        executor.forward = slowed(executor.forward)
    return slow


def _connector_pending(core: EngineCore) -> bool:
    return core._bridge.pending
