"""Fields of requests that Baton has no use for: harmless, refused, or named to the client.

Every field falls into one of four classes. *Supported* ones are in ``schemas``. *Harmless* ones have no effect on the
answer by their definition. *Refused* ones would change the answer and cannot be done: only
values that mean "as if absent" pass. Anything else is *ignored* and named in the ``x-baton-ignored-fields`` header, or
refused where the router is told to be strict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from baton.errors import InvalidRequestError

HARMLESS = frozenset(
    {
        "safety_identifier",
        "metadata",  # labels for stored answers
        "prompt_cache_key",  # a hint where the prompt may be cached; placement looks at the prompt itself
        "parallel_tool_calls",  # only has a meaning with tools, which are refused
    }
)

_TEXT = {"type": "text"}
ONLY_DEFAULT: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": (_TEXT, {}),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "documents": ([],),
    "chat_template": (),
    "typical_p": (1.0,),
    "mirostat": (0,),
    "thinking_token_budget": (),
}
"""Fields that cannot be done yet, and the values (beside null) that ask for nothing."""

_SILENT_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "spaces_between_special_tokens": (True,),
}
"""Fields that are ignored, but need no naming with these values (or null): they get what they ask for."""


def ignored_fields(extra: Mapping[str, Any]) -> list[str]:
    """Return those of a request's fields outside its schema that will have no effect though they might be meant to.

    Args:
        extra: The fields.

    Raises:
        InvalidRequestError: A field asks for something that cannot be done; names it.
    """
    ignored = []
    for name, value in extra.items():
        if name in HARMLESS:
            continue
        if name in ONLY_DEFAULT:
            if value is not None and value not in ONLY_DEFAULT[name]:
                raise InvalidRequestError(f"{name} is not supported yet; leave it out", field=name)
            continue
        if name in _SILENT_DEFAULTS and (value is None or value in _SILENT_DEFAULTS[name]):
            continue
        ignored.append(name)
    return ignored


def check_strict(ignored: Iterable[str], strict: bool) -> None:
    """Refuse ignored fields where the router is strict.

    Raises:
        InvalidRequestError: Names the first one.
    """
    if strict:
        for name in ignored:
            raise InvalidRequestError(f"{name[:100]} is not a field that this server knows", field=name[:100])


def header_value(ignored: Iterable[str]) -> str:
    """Return field names as a header's value: bounded, and nothing in it that doesn't belong into a header."""
    names = []
    room = 1000
    for name in ignored:
        clean = "".join(char if char.isascii() and (char.isalnum() or char in "_.-[]") else "?" for char in name[:64])
        room -= len(clean) + 2
        if room < 0:
            names.append("...")
            break
        names.append(clean)
    return ", ".join(names)
