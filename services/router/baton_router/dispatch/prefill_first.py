"""The order ``prefill_first``: a prefill instance computes the prompt before a decode instance is chosen.

The prefill instance keeps the KV under a lease. The decode instance is chosen when the prompt is computed; its request
names the prefill instance and the key of the lease, and it fetches the KV from there. If no prefill instance can
compute the prompt, or the policy has the decode instance compute it, the order is ``decode_first``.
"""

from __future__ import annotations

import asyncio
import logging

import grpc.aio

from baton.api.v1 import common_pb2, worker_pb2
from baton.background import create_task
from baton.errors import BatonError, QueueFullError, UnavailableError
from baton.rpc.convert import sampling_to_pb
from baton.rpc.errors import call_unary, from_rpc_error
from baton.token_ids import pack_ids
from baton.types import Order, PrefillPath, SamplingParams
from baton_router.metrics import Counter
from baton_router.registry.instance import Instance
from baton_router.scheduler.placement import Placement
from baton_router.types import RoutedRequest

log = logging.getLogger(__name__)
_ABORT_TIMEOUT_S = 5.0
_MAX_ID_CHARS = 240


class PrefillFirstCalls:
    """What the ``prefill_first`` requests of one router share.

    Args:
        outcomes: Counter of prompts by outcome.
    """

    def __init__(self, outcomes: Counter) -> None:
        self.outcomes = outcomes
        self._aborts: set[asyncio.Task[None]] = set()

    def abort(self, instance: Instance, request_id: str) -> None:
        """Tell a prefill instance, in the background, to drop a prompt; if that fails, the lease ends by itself."""
        task = create_task(_abort(instance, request_id), "abort of a prompt", detail=request_id)
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


class PrefillFirst:
    """One request's prompt while a prefill instance computes it or keeps its KV.

    Args:
        calls: Part that all requests share.
        request: The request.

    Attributes:
        pending: Whether the prompt may still be sent to a prefill instance.
        prefilled: Address of the prefill instance that keeps the KV, and its KV match rate before; ``None`` if no
            instance keeps it.
    """

    def __init__(self, calls: PrefillFirstCalls, request: RoutedRequest) -> None:
        self._calls = calls
        self._request = request
        self._asked: Instance | None = None
        self._tries = 0
        self._key = ""
        self._candidates: list[str] = []
        self._failures: list[str] = []
        self._order = Order.DECODE_FIRST
        self.pending = True
        self.prefilled: tuple[str, float] | None = None

    def applies(self, placement: Placement) -> bool:
        """Return whether a placement has a prefill instance compute the prompt, and clear :attr:`pending`."""
        self.pending = False
        if placement.prefill and placement.decision.path in (None, PrefillPath.REMOTE):
            return True
        self._calls.outcomes.labels("local").inc()
        return False

    async def compute(self, placement: Placement, sampling: SamplingParams, timeout_s: float) -> None:
        """Have a placement's prefill instances compute the prompt; the first that succeeds counts.

        If all fail, :attr:`prefilled` stays ``None``. The placement is released.

        Args:
            placement: Placement with the prefill instances, in order of preference.
            sampling: Sampling parameters of the request.
            timeout_s: Deadline of each try, in seconds.
        """
        try:
            for index, instance in enumerate(placement.prefill):
                try:
                    response = await self._ask(instance, sampling, timeout_s)
                except BatonError as error:
                    self._failures.append(f"{instance.address}: {error.message}")
                    log.warning(
                        "prefill of %s at %s failed: %s",
                        self._request_id,
                        instance.instance_id,
                        error.message,
                        extra={"request_id": self._request_id},
                    )
                    continue
                self._key = response.key
                self._order = Order.PREFILL_FIRST
                self.prefilled = instance.address, placement.decision.match_rate_of(instance.instance_id)
                self._candidates = [x.address for x in placement.prefill[index + 1 :]]
                if index == 0:
                    placement.prefilled()  # the reservation is on the first instance
                break
            self._calls.outcomes.labels("failed" if self.prefilled is None else "computed").inc()
        finally:
            placement.release()

    def fill(self, message: worker_pb2.GenerateRequest) -> None:
        """Set where the decode instance finds the KV, and which other instances could compute the prompt."""
        if self.prefilled is not None:
            message.prefilled.address = self.prefilled[0]
            message.prefilled.key = self._key
            message.ClearField("prefill_candidates")
            message.prefill_candidates.extend(self._candidates)

    def answered(self, trace: common_pb2.RequestTrace) -> Order:
        """Process a trace: the decode instance has fetched the KV, or found that its lease has ended.

        Returns:
            The order in which the request was served.
        """
        asked = self._asked
        self._asked = None
        self.prefilled = None
        if asked is not None and trace.path != common_pb2.PREFILL_PATH_REMOTE:
            self._calls.abort(asked, self._request_id)  # decode had the KV from elsewhere
        trace.failed_prefills.extend(self._failures)
        return self._order

    def on_decode_failure(self, error: BatonError) -> None:
        """Drop the KV, unless the decode instance was full: any other failed instance may have fetched it."""
        if not isinstance(error, QueueFullError):
            self.abandon()

    def abandon(self) -> None:
        """Drop the prompt's KV, whether it is computed or still being computed."""
        asked = self._asked
        self._asked = None
        self.prefilled = None
        self._order = Order.DECODE_FIRST
        if asked is not None:
            self._calls.abort(asked, self._request_id)

    @property
    def _request_id(self) -> str:
        return f"{self._request.request_id[-_MAX_ID_CHARS:]}~p{self._tries}"

    async def _ask(
        self, instance: Instance, sampling: SamplingParams, timeout_s: float
    ) -> worker_pb2.PrefillFirstResponse:
        request = self._request
        self._tries += 1
        message = worker_pb2.PrefillFirstRequest(
            request_id=self._request_id,
            prompt_token_ids=pack_ids(request.prompt_token_ids),
            sampling=sampling_to_pb(sampling),
            cache_salt=request.cache_salt,
            priority=request.priority,
            tenant=None if request.account is None else request.account.message,
            session_key=request.session_key,
            retention_s=request.retention_s,
            trace_context={"traceparent": request.span.traceparent} if request.span.traceparent else None,
        )
        self._asked = instance
        call = _Call(asyncio.get_running_loop().create_task(_prefill_first(instance, message, timeout_s)))
        instance.add_call(call)
        try:
            response = await call.result()
        except BatonError:
            self._asked = None
            raise
        finally:
            instance.remove_call(call)
            call.task.cancel()
        return response


class _Call:
    """A running PrefillFirst call, registered with its instance."""

    def __init__(self, task: asyncio.Task[worker_pb2.PrefillFirstResponse]) -> None:
        self.task = task
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def lose(self) -> None:
        """Fail: the instance was declared dead."""
        if not self._lost.done():
            self._lost.set_result(None)

    async def result(self) -> worker_pb2.PrefillFirstResponse:
        """Return the response.

        Raises:
            BatonError: The call failed, or the instance was declared dead.
        """
        await asyncio.wait((self.task, self._lost), return_when=asyncio.FIRST_COMPLETED)
        if not self.task.done():
            raise UnavailableError("the prefill instance does not answer any more")
        return self.task.result()


async def _prefill_first(
    instance: Instance, message: worker_pb2.PrefillFirstRequest, timeout_s: float
) -> worker_pb2.PrefillFirstResponse:
    try:
        return await call_unary(instance.stub.PrefillFirst, message, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def _abort(instance: Instance, request_id: str) -> None:
    try:
        request = worker_pb2.AbortRequest(request_id=request_id)
        await call_unary(instance.stub.Abort, request, timeout=_ABORT_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        log.info(
            "%s was not told that %s is not wanted any more: %s",
            instance.instance_id,
            request_id,
            error,
            extra={"request_id": request_id},
        )
