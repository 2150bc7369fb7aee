"""The order ``prefill_first``: a prefill instance computes the prompt before a decode instance is chosen.

The prefill instance keeps the KV under a lease; the decode instance, chosen when the prompt is computed, is told where
it waits and claims it. Where no prefill instance can do that, or the policy has the decode instance compute the prompt,
the request is served in the other order, ``decode_first``.
"""

from __future__ import annotations

import asyncio
import logging

import grpc.aio

from baton.api.v1 import common_pb2, worker_pb2
from baton.errors import BatonError, QueueFullError, TransferError, UnavailableError
from baton.rpc.convert import sampling_to_pb
from baton.rpc.errors import from_rpc_error, readable
from baton.token_ids import pack_ids
from baton.types import Order, PrefillPath, SamplingParams
from baton_router.metrics.fast_metrics import Counter
from baton_router.registry.instance import Instance
from baton_router.scheduler.placement import Placement
from baton_router.types import RoutedRequest

log = logging.getLogger(__name__)
_ABORT_TIMEOUT_S = 5.0
_MAX_ID_CHARS = 240


class PrefillFirstCalls:
    """What the requests of one router that are prefilled first share.

    Args:
        outcomes: Counts what came of prompts.
    """

    def __init__(self, outcomes: Counter) -> None:
        self.outcomes = outcomes
        self._aborts: set[asyncio.Task[None]] = set()

    def abort(self, instance: Instance, request_id: str) -> None:
        """Tell a prefill instance that a prompt is not wanted any more; without word from here its lease ends."""
        task = asyncio.get_running_loop().create_task(_abort(instance, request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


class PrefillFirst:
    """One request's prompt on its way to, and at, a prefill instance.

    Args:
        calls: Shared by all requests.
        request: The request.

    Attributes:
        pending: Whether the prompt may still be sent to a prefill instance.
        prefilled: Where the KV waits: the prefill instance's address, and the KV match rate that it had; ``None``:
            nowhere.
    """

    def __init__(self, calls: PrefillFirstCalls, request: RoutedRequest) -> None:
        self._calls, self._request = calls, request
        self._asked: Instance | None = None
        self._tries = 0
        self._key = ""
        self._candidates: list[str] = []
        self._failures: list[str] = []
        self._order = Order.DECODE_FIRST
        self.pending = True
        self.prefilled: tuple[str, float] | None = None

    def applies(self, placement: Placement) -> bool:
        """Return whether a placement has a prefill instance compute the prompt. It is not :attr:`pending` any more."""
        self.pending = False
        if placement.prefill and placement.decision.path in (None, PrefillPath.REMOTE):
            return True
        self._calls.outcomes.labels("local").inc()
        return False

    async def compute(self, placement: Placement, sampling: SamplingParams, timeout_s: float) -> None:
        """Have the first of a placement's prefill instances that can do it compute the prompt.

        When none can, :attr:`prefilled` stays ``None``. The placement is released.
        """
        try:
            for at, instance in enumerate(placement.prefill):
                try:
                    response = await self._ask(instance, sampling, timeout_s)
                except BatonError as error:
                    self._failures.append(f"{instance.address}: {error.message}")
                    log.warning(
                        "prefill of %s at %s failed: %s",
                        *(self._request_id, instance.instance_id, error.message),
                        extra={"request_id": self._request_id},
                    )
                    continue
                self._key, self._order = response.key, Order.PREFILL_FIRST
                self.prefilled = instance.address, placement.decision.match_rate_of(instance.instance_id)
                self._candidates = [x.address for x in placement.prefill[at + 1 :]]
                if at == 0:
                    placement.prefilled()  # what is reserved is the first one's
                break
            self._calls.outcomes.labels("failed" if self.prefilled is None else "computed").inc()
        finally:
            placement.release()

    def fill(self, message: worker_pb2.GenerateRequest) -> None:
        """Tell the decode instance where the KV waits, and which others could compute the prompt."""
        if self.prefilled is not None:
            message.prefilled.address, message.prefilled.key = self.prefilled[0], self._key
            message.ClearField("prefill_candidates")
            message.prefill_candidates.extend(self._candidates)

    def answered(self, trace: common_pb2.RequestTrace) -> Order:
        """Take a trace: the decode instance has claimed the KV, or found that it waits no more.

        Returns:
            The order in which the request was served.
        """
        asked, self._asked, self.prefilled = self._asked, None, None
        if asked is not None and trace.path != common_pb2.PREFILL_PATH_REMOTE:
            self._calls.abort(asked, self._request_id)  # decode had the KV from elsewhere
        trace.failed_prefills.extend(self._failures)
        return self._order

    def failed(self, error: BatonError) -> None:
        """Take a decode instance's failure: unless it was full it may have claimed the KV, so nothing counts on it."""
        if not isinstance(error, QueueFullError):
            self.abandon()

    def abandon(self) -> None:
        """Drop what waits, or is computed, for a request that does not want it any more."""
        asked, self._asked, self.prefilled, self._order = self._asked, None, None, Order.DECODE_FIRST
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
            trace_context={"traceparent": request.span.traceparent} if request.span.traceparent else None,
        )
        self._asked = instance
        call = _Call(asyncio.get_running_loop().create_task(_prefill_first(instance, message, timeout_s)))
        instance.began(call)
        try:
            response = await call.result()
        except BatonError:
            self._asked = None
            raise
        finally:
            instance.ended(call)
            call.task.cancel()
        return response


class _Call:
    """A running PrefillFirst, as its instance knows it."""

    def __init__(self, task: asyncio.Task[worker_pb2.PrefillFirstResponse]) -> None:
        self.task = task
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def lose(self) -> None:
        """The instance does not answer any more."""
        if not self._lost.done():
            self._lost.set_result(None)

    async def result(self) -> worker_pb2.PrefillFirstResponse:
        """Wait for the answer.

        Raises:
            BatonError: There is none.
        """
        await asyncio.wait((self.task, self._lost), return_when=asyncio.FIRST_COMPLETED)
        if not self.task.done():
            raise UnavailableError("the prefill instance does not answer any more")
        return self.task.result()


async def _prefill_first(
    instance: Instance, message: worker_pb2.PrefillFirstRequest, timeout_s: float
) -> worker_pb2.PrefillFirstResponse:
    try:
        response: worker_pb2.PrefillFirstResponse = readable(
            await instance.stub.PrefillFirst(message, timeout=timeout_s)
        )
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except grpc.aio.UsageError as error:  # the channel was closed
        raise TransferError(f"the connection was closed: {error}") from error
    return response


async def _abort(instance: Instance, request_id: str) -> None:
    try:
        await instance.stub.Abort(worker_pb2.AbortRequest(request_id=request_id), timeout=_ABORT_TIMEOUT_S)
    except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
        log.info(
            "%s was not told that %s is not wanted any more: %s",
            *(instance.instance_id, request_id, error),
            extra={"request_id": request_id},
        )
