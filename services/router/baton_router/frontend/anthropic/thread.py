"""Threads of ``/v1/messages``: conversations that the router stores, so that a request sends the new turns alone."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.errors import shown
from baton_router.frontend.anthropic.schemas import MessagesBody
from baton_router.frontend.openai.response_store import ResponseStore
from baton_router.frontend.openai.schemas import invalid_field
from baton_router.types import Account


class Thread(msgspec.Struct):
    """A conversation, and where its next answer is stored.

    Attributes:
        ident: Identifier of the answer.
        system: Instructions.
        tools: Tools.
        turns: The turns before those of the request.
        account: Account of the request; ``None`` without API keys.
        store: Store of conversations.
    """

    ident: str
    system: str | list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    turns: list[Mapping[str, Any]]
    account: Account | None
    store: ResponseStore

    def add_turns(self, turns: Sequence[Mapping[str, Any]]) -> None:
        """Add the turns of the request."""
        self.turns = [*self.turns, *turns]

    def store_answer(self, content: list[dict[str, Any]]) -> None:
        """Store the conversation with its answer."""
        turns = [*self.turns, {"role": "assistant", "content": content}]
        conversation = {"system": self.system, "tools": self.tools, "messages": turns}
        self.store.add(self.account, self.ident, conversation)


def open_thread(body: MessagesBody, account: Account | None, store: ResponseStore) -> Thread | None:
    """Return the thread of a request; ``None``: it has none.

    Raises:
        InvalidRequestError: A field is wrong; names it.
        NotFoundError: The account has no such thread, or not any more.
    """
    thread = body.thread
    if thread is None:
        return None
    ident = f"msg_{secrets.token_hex(24)}"
    field = "thread.previous_message_id"
    previous = thread.get("previous_message_id")
    if thread.get("type") == "create":
        if previous is not None:
            raise invalid_field(field, 'is for threads that go on: their type is "continue"')
        return Thread(ident, body.system, body.tools, [], account, store)
    if thread.get("type") != "continue":
        raise invalid_field("thread.type", f"must be create or continue, got {shown(thread.get('type'))}")
    if not isinstance(previous, str):
        raise invalid_field(field, f"must be a string, got {shown(previous)}")
    for name in ("system", "tools"):
        if getattr(body, name) is not None:
            raise invalid_field(name, "is that of the thread: leave it out where one goes on")
    found = store.thread(account, previous)
    return Thread(ident, found["system"], found["tools"], found["messages"], account, store)
