"""An answer that broke off goes on elsewhere: what is asked of another router.

A sequence depends on its seed and its own tokens alone, so the next token is the one that would have come. The other
router makes text of the tokens that there are, too, and leaves out as many characters as the caller has.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.api.v1 import router_pb2
from baton.client.types import Answer
from baton.seeds import sequence_seed


@dataclass(frozen=True, slots=True)
class Rest:
    """One sequence that goes on.

    Attributes:
        index: Which one.
        request: What is asked for it.
        repeated: Tokens that come once more, as the first of the answer.
    """

    index: int
    request: router_pb2.RouterGenerateRequest
    repeated: int


def rest_of(request: router_pb2.RouterGenerateRequest, answer: Answer) -> Rest | None:
    """Return how the first sequence goes on that has not ended; ``None``: all have.

    Args:
        request: As it was asked, with a seed.
        answer: What has come of it.
    """
    index = next(iter(answer.open_sequences()), None)
    if index is None:
        return None
    token_ids, chars = answer.progress(index)
    # All tokens have come, but not how it ended: the last one comes again, and its end with it.
    repeated = int(request.sampling.HasField("max_tokens") and len(token_ids) >= request.sampling.max_tokens)
    rest = router_pb2.RouterGenerateRequest()
    rest.CopyFrom(request)
    rest.sampling.n = 1
    rest.sampling.seed = sequence_seed(request.sampling.seed, index)
    rest.ClearField("ttft_ms")
    if answer.has_prompt_logprobs:
        rest.sampling.ClearField("prompt_logprobs")
    rest.output_token_ids.extend(token_ids[: len(token_ids) - repeated])
    rest.output_chars = chars
    return Rest(index, rest, repeated)
