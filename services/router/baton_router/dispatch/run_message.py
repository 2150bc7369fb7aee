"""What a decode instance is sent of a request's run."""

from __future__ import annotations

from baton.api.v1 import worker_pb2
from baton.rpc.convert import encode_sampling
from baton.seeds import sequence_seed
from baton.token_ids import TokenIds, pack_ids, varint
from baton.types import SamplingParams
from baton_router.dispatch.group import Group
from baton_router.scheduler.placement import Placement
from baton_router.types import RoutedRequest

_MAX_ID_CHARS = 240
"""Of a request's id that instances see: they take 256, with room for the number of the call."""
_PROMPT_TAG = bytes([worker_pb2.GenerateRequest.PROMPT_TOKEN_IDS_FIELD_NUMBER << 3 | 2])
_SAMPLING_TAG = bytes([worker_pb2.GenerateRequest.SAMPLING_FIELD_NUMBER << 3 | 2])


def message_of(request: RoutedRequest, group: Group, placement: Placement, call: int) -> worker_pb2.GenerateRequest:
    """Return the message, but for sampling and prompt. What is empty isn't set, which takes time.

    Args:
        request: The request.
        group: Those of its sequences that are meant.
        placement: Where they go.
        call: How many calls the request has had, with this one.
    """
    first = group.sequences[0]
    # Unique among live requests, also beside a call of ours that its instance has not yet seen cancelled.
    request_id = request.request_id[-_MAX_ID_CHARS:]
    message = worker_pb2.GenerateRequest(request_id=request_id if call == 1 else f"{request_id}~{call}")
    if len(group.sequences) == 1 and first.token_ids:
        message.output_token_ids.extend(first.token_ids)
    if placement.prefill:
        message.prefill_candidates.extend([x.address for x in placement.prefill])
    if request.cache_salt:
        message.cache_salt = request.cache_salt
    if request.priority:
        message.priority = request.priority
    if request.account is not None and request.account.message is not None:
        message.tenant.CopyFrom(request.account.message)
    if (threshold := placement.remote_threshold) is not None:
        message.remote_prefill_threshold = threshold
    return message


def sampling_of(sampling: SamplingParams, group: Group, *, prompt_logprobs: bool) -> SamplingParams:
    """Return the sampling parameters of a group: a sequence that goes on alone has its own seed.

    Args:
        sampling: The request's.
        group: The sequences.
        prompt_logprobs: Whether those of the prompt are still wanted.
    """
    if len(group.sequences) < sampling.n:
        sampling = sampling.replace(n=1, seed=sequence_seed(sampling.seed or 0, group.sequences[0].index))
    if sampling.prompt_logprobs is not None and not prompt_logprobs:
        sampling = sampling.replace(prompt_logprobs=None)
    return sampling


def encoded(message: worker_pb2.GenerateRequest, sampling: SamplingParams, prompt: TokenIds) -> bytes:
    """Return a message's bytes: sampling and prompt are bytes already, as fields behind all others."""
    settings, ids = encode_sampling(sampling), pack_ids(prompt)
    tagged_settings = _SAMPLING_TAG + varint(len(settings)) + settings
    return message.SerializeToString() + tagged_settings + _PROMPT_TAG + varint(len(ids)) + ids
