"""What the HTTP front can be told."""

from __future__ import annotations

from dataclasses import dataclass

from baton_router.accounts.accounts import Accounts


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Options of the HTTP front.

    Attributes:
        accounts: Whose keys a client must show as ``Authorization: Bearer``; ``None``: no key is wanted.
        strict_fields: Refuse requests with fields that have no effect, instead of naming these in a header.
        max_body_bytes: Longest request body.
        max_prompts: Prompts in one completion request.
        body_timeout_s: Seconds a client has to send its request.
        send_timeout_s: Seconds a client may leave a piece of the answer untaken before its request is cancelled.
        request_timeout_s: Seconds a generation may take.
        cors_origins: Origins that browsers may call from.
    """

    accounts: Accounts | None = None
    strict_fields: bool = False
    max_body_bytes: int = 16 * 2**20
    max_prompts: int = 128
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    request_timeout_s: float = 600.0
    cors_origins: tuple[str, ...] = ()
