"""Conversion between wire messages and Baton's own types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.api.v1 import common_pb2, router_pb2
from baton.errors import InternalError, InvalidRequestError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import LayerShape
from baton.tracing import Attribute
from baton.types import FinishReason, Grammar, PrefillPath, Role, SamplingParams, Tenant, TokenLogprob

if TYPE_CHECKING:  # services without text load no tokenizer
    from baton.tokenizer import TextDelta

_ROLES: dict[Role, common_pb2.Role.ValueType] = {
    Role.PREFILL: common_pb2.ROLE_PREFILL,
    Role.DECODE: common_pb2.ROLE_DECODE,
}
_FINISH: dict[FinishReason, common_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_PATHS: dict[PrefillPath, common_pb2.PrefillPath.ValueType] = {
    PrefillPath.LOCAL: common_pb2.PREFILL_PATH_LOCAL,
    PrefillPath.REMOTE: common_pb2.PREFILL_PATH_REMOTE,
    PrefillPath.STORE: common_pb2.PREFILL_PATH_STORE,
}
MAX_SESSION_KEY_BYTES = 16
_FINISH_OF: dict[int, FinishReason] = {wire: reason for reason, wire in _FINISH.items()}
_PATH_OF: dict[int, PrefillPath] = {wire: path for path, wire in _PATHS.items()}
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "speculative_tokens")
MODEL_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling fields that a model may have defaults for beside ``max_tokens``; services send them always."""
_PLAIN = tuple(
    field.name
    for field in common_pb2.SamplingParams.DESCRIPTOR.fields
    if field.name not in {*_OPTIONAL, *MODEL_DEFAULTED, "n", "stop_token_ids", "logit_bias", "grammar"}
)
"""Sampling fields whose default is 0 on both sides: all others."""


def role_to_pb(role: Role) -> common_pb2.Role.ValueType:
    """Role to its wire value."""
    return _ROLES[role]


def role_from_pb(value: int) -> Role:
    """Wire value to role.

    Raises:
        InvalidRequestError: Unspecified or unknown.
    """
    for role, wire in _ROLES.items():
        if wire == value:
            return role
    raise InvalidRequestError(f"role must be prefill or decode, got {value}", field="role")


def tenant_to_pb(tenant: Tenant | None) -> common_pb2.Tenant | None:
    """Tenant to the wire; ``None`` leaves the field out."""
    if tenant is None:
        return None
    return common_pb2.Tenant(id=tenant.id, kv_bytes=tenant.kv_bytes, kv_disk_bytes=tenant.kv_disk_bytes)


def tenant_from_pb(message: common_pb2.Tenant) -> Tenant | None:
    """Wire message to tenant; an empty one is ``None``.

    Raises:
        InvalidRequestError: The id is none, or a quota does not fit.
    """
    if not (message.id or message.kv_bytes or message.kv_disk_bytes):
        return None
    return Tenant(message.id, message.kv_bytes, message.kv_disk_bytes)


def session_key_from_pb(key: bytes) -> bytes:
    """Check the key of a conversation.

    Raises:
        InvalidRequestError: It has more than 16 bytes.
    """
    if len(key) > MAX_SESSION_KEY_BYTES:
        raise InvalidRequestError(
            f"session_key must have at most {MAX_SESSION_KEY_BYTES} bytes, got {len(key)}", field="session_key"
        )
    return key


def finish_to_pb(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """Finish reason to its wire value; ``None`` (not ended) is unspecified."""
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH[reason]


def finish_from_pb(value: int) -> FinishReason | None:
    """Wire value to finish reason; unspecified means not ended."""
    return _FINISH_OF.get(value)


def path_to_pb(path: PrefillPath) -> common_pb2.PrefillPath.ValueType:
    """Prefill path to its wire value."""
    return _PATHS[path]


def path_from_pb(value: int) -> PrefillPath | None:
    """Wire value to prefill path; unspecified is ``None``."""
    return _PATH_OF.get(value)


def sampling_to_pb(params: SamplingParams) -> common_pb2.SamplingParams:
    """Sampling parameters to the wire; stop strings stay behind, workers have no text."""
    message = common_pb2.SamplingParams(
        n=params.n,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
    )
    if params.stop_token_ids:
        message.stop_token_ids.extend(params.stop_token_ids)
    for token_id, bias in params.logit_bias.items():
        message.logit_bias[token_id] = bias
    for name in _PLAIN:
        value = getattr(params, name)
        if value:  # fields that are 0 are not sent
            setattr(message, name, value)
    for name in _OPTIONAL:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    if params.grammar is not None:
        message.grammar.CopyFrom(grammar_to_pb(params.grammar))
    return message


def grammar_to_pb(grammar: Grammar) -> common_pb2.Grammar:
    return common_pb2.Grammar(kind=grammar.kind, text=grammar.text, start_token_ids=grammar.start_token_ids)


def grammar_from_pb(message: common_pb2.Grammar) -> Grammar:
    """Grammar from the wire, not validated yet."""
    return Grammar(message.kind, message.text, tuple(message.start_token_ids))


def sampling_from_pb(message: common_pb2.SamplingParams, *, stop: tuple[str, ...] = ()) -> SamplingParams:
    """Sampling parameters from the wire, not validated yet.

    float32 fields come back rounded to 7 significant digits, so that 0.1 stays 0.1.
    """
    values: dict[str, object] = {name: _clean(getattr(message, name)) for name in _PLAIN}
    for name in (*MODEL_DEFAULTED, *_OPTIONAL):
        if message.HasField(name):  # type: ignore[arg-type]
            values[name] = _clean(getattr(message, name))
    return SamplingParams(
        stop=stop,
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias={token: _clean(bias) for token, bias in message.logit_bias.items()},
        n=message.n or 1,
        grammar=grammar_from_pb(message.grammar) if message.HasField("grammar") else None,
        **values,  # type: ignore[arg-type]
    )


def _clean(value: float) -> float:
    return float(f"{value:.7g}") if isinstance(value, float) else value


def logprob_to_pb(item: TokenLogprob) -> common_pb2.TokenLogprob:
    """Log probability to the wire."""
    return common_pb2.TokenLogprob(
        token_id=item.token_id,
        logprob=item.logprob,
        rank=item.rank,
        top_token_ids=[token for token, _ in item.top],
        top_logprobs=[value for _, value in item.top],
    )


def logprob_from_pb(message: common_pb2.TokenLogprob) -> TokenLogprob:
    """Log probability from the wire.

    Raises:
        InternalError: The peer's lists of candidates are not parallel.
    """
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise InternalError(f"{len(message.top_logprobs)} log probabilities for {len(message.top_token_ids)} tokens")
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return TokenLogprob(message.token_id, message.logprob, message.rank, top)


def prompt_logprobs_to_pb(items: list[TokenLogprob | None]) -> list[common_pb2.TokenLogprob]:
    """Prompt log probabilities to the wire; the first token's ``None`` is an empty message (rank 0)."""
    return [common_pb2.TokenLogprob() if item is None else logprob_to_pb(item) for item in items]


def prompt_logprobs_from_pb(messages: list[common_pb2.TokenLogprob]) -> list[TokenLogprob | None]:
    """Prompt log probabilities from the wire."""
    return [logprob_from_pb(message) if message.rank else None for message in messages]


def add_to(trace: common_pb2.RequestTrace, name: str, more: int) -> None:
    """Add to a numeric field of a trace; the sum is capped at the field's maximum, as peers may send any number."""
    field = trace.DESCRIPTOR.fields_by_name[name]
    most = 2**32 - 1 if field.cpp_type == field.CPPTYPE_UINT32 else 2**64 - 1
    setattr(trace, name, min(most, getattr(trace, name) + more))


def text_delta_to_pb(delta: TextDelta) -> router_pb2.TextDelta:
    """One sequence's new text to the wire."""
    return router_pb2.TextDelta(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=[logprob_to_pb(item) for item in delta.logprobs],
        finish_reason=finish_to_pb(delta.finish_reason),
        stop_reason=delta.stop_reason if isinstance(delta.stop_reason, str) else "",
    )


_FINGERPRINT_PLAIN = tuple(
    field.name
    for field in common_pb2.Fingerprint.DESCRIPTOR.fields
    if field.name not in {"layer_shapes", "unsplit_layers", "layer_groups"}
)


def fingerprint_to_pb(fingerprint: Fingerprint) -> common_pb2.Fingerprint:
    shapes = [n for s in fingerprint.layer_shapes for n in (s.kv_heads, s.k_dim, s.v_dim)]
    plain = {name: getattr(fingerprint, name) for name in _FINGERPRINT_PLAIN}
    return common_pb2.Fingerprint(
        layer_shapes=shapes,
        unsplit_layers=fingerprint.unsplit_layers,
        layer_groups=fingerprint.layer_groups,
        **plain,
    )


def fingerprint_from_pb(message: common_pb2.Fingerprint) -> Fingerprint:
    """Fingerprint from the wire.

    Raises:
        InvalidRequestError: The layer shapes are not triples.
    """
    flat = list(message.layer_shapes)
    if len(flat) % 3:
        raise InvalidRequestError("layer_shapes must be triples", field="fingerprint.layer_shapes")
    shapes = tuple(LayerShape(*flat[i : i + 3]) for i in range(0, len(flat), 3))
    plain = {name: getattr(message, name) for name in _FINGERPRINT_PLAIN}
    return Fingerprint(
        layer_shapes=shapes,
        unsplit_layers=tuple(message.unsplit_layers),
        layer_groups=tuple(message.layer_groups),
        **plain,
    )


def trace_attributes(trace: common_pb2.RequestTrace) -> dict[str, Attribute]:
    """Return the fields of a trace that are set, as a span's attributes ``baton.<field>``."""
    attributes: dict[str, Attribute] = {}
    for field, value in trace.ListFields():
        name = f"baton.{field.name}"
        if field.name == "path":
            attributes[name] = str(path_from_pb(value))
        else:
            attributes[name] = tuple(value) if field.name == "failed_prefills" else value
    return attributes
