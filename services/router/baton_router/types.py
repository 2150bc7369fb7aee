"""What several parts of the router share: the holder of an API key, the model that is served, a request in tokens."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from baton.api.v1 import common_pb2
from baton.errors import InvalidRequestError
from baton.token_ids import TokenIds
from baton.tracing import UNTRACED, Span
from baton.types import Order, RequestId, SamplingParams, Tenant

MAX_SALT_CHARS = 512


@dataclass(frozen=True, slots=True, eq=False)
class Account:
    """The holder of API keys.

    Attributes:
        tenant: As services tell each other.
        weight: Share of the queue beside others'.
        max_in_flight: Requests that may run or wait at once; 0: any number.
        requests_per_minute: 0: any number.
        tokens_per_minute: Prompt tokens and expected output tokens; 0: any number.
        priority_floor: Lowest number, that is highest priority, that its requests may have; others get this one.
        admin: Whether it may see all tenants' requests.
        salt_key: Key of its salts.
    """

    tenant: Tenant
    weight: float
    max_in_flight: int
    requests_per_minute: int
    tokens_per_minute: int
    priority_floor: int
    admin: bool
    salt_key: bytes = field(repr=False)
    message: common_pb2.Tenant | None = field(repr=False)
    own_salt: str = field(repr=False)

    @property
    def name(self) -> str:
        return self.tenant.id

    @property
    def limited(self) -> bool:
        """Whether it has limits of its own."""
        return bool(self.max_in_flight or self.requests_per_minute or self.tokens_per_minute)

    def salt(self, cache_salt: str) -> str:
        """Return the salt of block hashes for a request.

        Args:
            cache_salt: The client's own; empty: none.

        Raises:
            InvalidRequestError: It is too long.
        """
        if not cache_salt:
            return self.own_salt
        if len(cache_salt) > MAX_SALT_CHARS:
            raise InvalidRequestError(f"cache_salt must have at most {MAX_SALT_CHARS} characters", field="cache_salt")
        return salt_of(self.salt_key, cache_salt)


def salt_of(key: bytes, cache_salt: str) -> str:
    """Return the salt of block hashes that a tenant's key and a client's own salt make."""
    return hmac.digest(key, cache_salt.encode("utf-8", "surrogatepass"), "sha256").hex()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that the instances serve, as they report it; ``grammars``: whether one takes requests with them."""

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    grammars: bool = False


class RoutedRequest(msgspec.Struct):
    """A request in tokens, ready to be placed. ``sampling`` has ``max_tokens`` and ``seed`` set and is validated.

    Attributes:
        ttft_ms: The first token is wanted within so many milliseconds of the arrival; ``None``: at any time.
        itl_ms: Most milliseconds wanted between two tokens; ``None``: any.
        tenant: With whom it shares its part of the cluster.
        account: Whose API key it showed, if it had to.
        arrived: When it came, by ``time.perf_counter()``; 0: just now.
        output_token_ids: Generated so far, elsewhere; with ``n`` = 1.
        order: In which it is to be served; ``None``: in the router's own.
        span: What happens to it.
    """

    request_id: RequestId
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    session: str = ""
    ttft_ms: float | None = None
    itl_ms: float | None = None
    tenant: str = ""
    arrived: float = 0.0
    output_token_ids: Sequence[int] = ()
    account: Account | None = None
    order: Order | None = None
    span: Span = UNTRACED
