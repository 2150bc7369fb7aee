"""What a request must be before it may wait: every refusal happens here, before any block is taken."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from baton.engine.request import EngineRequest
from baton.engine.sample.rng import request_seed
from baton.errors import InvalidRequestError
from baton.types import SamplingParams


def check_request(request: EngineRequest, *, vocab_size: int, max_model_len: int, seed: int) -> SamplingParams:
    """Check a request and fill in what it left open.

    Args:
        request: The request.
        vocab_size: Token ids must be below it.
        max_model_len: Most tokens of prompt and output together.
        seed: The engine's seed, for requests that bring none.

    Returns:
        The sampling parameters with ``max_tokens`` and ``seed`` set; ``n`` is 1 for ``prefill_only``.

    Raises:
        InvalidRequestError: Names the field.
    """
    sampling = request.sampling
    if not request.request_id:
        raise InvalidRequestError("request_id is empty", field="request_id")
    if len(request.prompt_token_ids) == 0:
        raise InvalidRequestError("prompt is empty: at least one token is needed", field="prompt")
    _check_tokens(request.prompt_token_ids, vocab_size, "prompt")
    _check_tokens(request.output_token_ids, vocab_size, "output_token_ids")
    sampling.validate(vocab_size=vocab_size)
    num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
    if request.prefill_only:
        sampling = sampling.replace(n=1)
        limit = max_model_len
    else:
        limit = max_model_len - 1
    if num_prompt > limit:
        raise InvalidRequestError(
            f"prompt has {num_prompt} tokens, but at most {limit} fit into max_model_len ({max_model_len})",
            field="prompt",
        )
    max_tokens = sampling.max_tokens if sampling.max_tokens is not None else max(1, max_model_len - num_prompt)
    if not request.prefill_only and num_prompt + max_tokens > max_model_len:
        raise InvalidRequestError(
            f"max_tokens is {max_tokens}, but after a prompt of {num_prompt} tokens only "
            f"{max_model_len - num_prompt} fit into max_model_len ({max_model_len})",
            field="max_tokens",
        )
    if num_output and (num_output >= max_tokens or num_prompt + num_output > limit):
        raise InvalidRequestError(
            f"output_token_ids has {num_output} tokens: nothing is left to generate", field="output_token_ids"
        )
    if num_output and sampling.n > 1:
        raise InvalidRequestError(
            "a request with output_token_ids continues one sequence: n must be 1 "
            "(send each sequence with its own seed)",
            field="n",
        )
    return sampling.replace(
        max_tokens=max_tokens,
        seed=sampling.seed if sampling.seed is not None else request_seed(seed, request.request_id),
    )


def _check_tokens(token_ids: SequenceOf[int], vocab_size: int, field: str) -> None:
    try:
        array = np.asarray(token_ids if len(token_ids) else np.empty(0, np.int64))
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{field} must be a flat list of token ids", field=field) from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequestError(f"{field} must be a flat list of token ids", field=field)
    wrong = array[(array < 0) | (array >= vocab_size)]
    if len(wrong):
        raise InvalidRequestError(
            f"{field} has token id {wrong[0]}, which is not in the vocabulary (0 to {vocab_size - 1})", field=field
        )
