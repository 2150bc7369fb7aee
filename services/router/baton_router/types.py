"""Types shared by parts of the router: the holder of an API key, the served model, a request in tokens."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
        tenant: Tenant, as it is sent to other services.
        weight: Weight of its share of the queue, above 0.
        max_in_flight: Maximum requests that run or wait at once; 0: unlimited.
        requests_per_minute: Maximum requests per minute; 0: unlimited.
        tokens_per_minute: Maximum prompt and expected output tokens per minute; 0: unlimited.
        priority_floor: Lowest number, that is highest priority, that its requests may have; others get this one.
        admin: Whether it may see all tenants' requests.
        salt_key: Key that its salts are derived from.
        message: ``tenant`` as a wire message.
        own_salt: Salt of its requests without a ``cache_salt``.
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
        """Whether it has limits."""
        return bool(self.max_in_flight or self.requests_per_minute or self.tokens_per_minute)

    def salt(self, cache_salt: str) -> str:
        """Return the salt of block hashes for a request.

        Args:
            cache_salt: Salt chosen by the client; empty: none.

        Raises:
            InvalidRequestError: ``cache_salt`` is too long.
        """
        if not cache_salt:
            return self.own_salt
        if len(cache_salt) > MAX_SALT_CHARS:
            raise InvalidRequestError(f"cache_salt must have at most {MAX_SALT_CHARS} characters", field="cache_salt")
        return salt_of(self.salt_key, cache_salt)


def salt_of(key: bytes, cache_salt: str) -> str:
    """Return the salt of block hashes derived from a tenant's key and a client's own salt."""
    return hmac.digest(key, cache_salt.encode("utf-8", "surrogatepass"), "sha256").hex()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that the instances serve.

    Attributes:
        name: Name in answers: the one that the request has, else the first of the names.
        grammars: Whether an instance accepts requests with a grammar.
        names: All names that requests may have; empty: ``name`` alone.
    """

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    grammars: bool = False
    names: tuple[str, ...] = ()

    def under(self, name: str) -> ModelInfo:
        """Return the same model with another of its names."""
        return replace(self, name=name)

    @property
    def aliases(self) -> list[ModelInfo]:
        """The model under each of its names."""
        return [self.under(name) for name in self.names] or [self]


class RoutedRequest(msgspec.Struct):
    """A request in tokens, ready to be placed. ``sampling`` has ``max_tokens`` and ``seed`` set and is validated.

    Attributes:
        ttft_ms: Target of the time to first token, in milliseconds from arrival; ``None``: none.
        itl_ms: Target of the time between two tokens, in milliseconds; ``None``: none.
        expected_tokens: Tokens of output per sequence that are expected, at most ``max_tokens``; ``None``: unknown.
        retention_s: Seconds for which eviction is asked to spare the conversation's KV, within the operator's bound;
            below 0: this is its last request.
        tenant: Name of the tenant for fairness.
        arrived: Time of arrival by ``time.perf_counter()``; 0: just now.
        output_token_ids: Tokens generated elsewhere so far; only with ``n`` = 1.
        account: Holder of its API key; ``None``: there are no API keys.
        order: Requested order of service; ``None``: the router's own.
        span: Span of its trace.
    """

    request_id: RequestId
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    session: str = ""
    retention_s: float = 0.0
    ttft_ms: float | None = None
    itl_ms: float | None = None
    expected_tokens: int | None = None
    tenant: str = ""
    arrived: float = 0.0
    output_token_ids: Sequence[int] = ()
    account: Account | None = None
    order: Order | None = None
    span: Span = UNTRACED

    @property
    def session_key(self) -> bytes:
        """Key of the conversation for instances, 8 bytes that do not show its name; empty: there is none."""
        if not self.session:
            return b""
        return hashlib.blake2b(self.session.encode(errors="surrogatepass"), digest_size=8).digest()

    @property
    def num_given(self) -> int:
        """Number of tokens that an instance computes before the first new one: the prompt, and output given with it."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)
