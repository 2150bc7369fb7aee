"""The conversations that the router stores: those of ``/v1/responses``, and threads of ``/v1/messages``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import InvalidRequestError, NotFoundError, shown
from baton_router.frontend.http.errors import json_response
from baton_router.frontend.http.middleware import account_of
from baton_router.frontend.http.readers import Readers
from baton_router.types import Account

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 1024 * 1024
"""Of each account."""
MAX_ENTRY_BYTES = 4 * 1024 * 1024
"""Of one response: a request that goes on with it has it decoded on the event loop."""
MAX_TOTAL_BYTES = 256 * 1024 * 1024
MAX_READERS = 16
_MAX_LISTED = 100


class _Kept(NamedTuple):
    """What is stored of a response, encoded: who reads it has it put together from pieces, not decoded."""

    conversation: bytes
    body: bytes | None
    inputs: Sequence[tuple[str, bytes]]
    outputs: Mapping[str, bytes]

    @property
    def size(self) -> int:
        items = sum(len(ident) + len(item) for ident, item in [*self.inputs, *self.outputs.items()])
        return len(self.conversation) + len(self.body or b"") + items


def _encode(value: Any) -> bytes:
    """Return a value as JSON. Copied: orjson's own results keep 4 to 8 KiB each, however short they are."""
    return bytes(memoryview(orjson.dumps(value)))


class ResponseStore:
    """Stores the latest responses of each account, bounded in number and bytes. Used in one event loop.

    If all accounts together take too many bytes, the largest account loses its oldest response.

    Args:
        on_change: Called with the number of stored responses and their size in bytes, on every change.
    """

    def __init__(self, on_change: Callable[[int, int], None] = lambda responses, size: None) -> None:
        self._kept: dict[str, OrderedDict[str, _Kept]] = {}
        self._sizes: dict[str, int] = {}
        self._items: dict[tuple[str, str], str] = {}
        self._on_change = on_change
        self._readers = Readers(MAX_READERS, "large responses")

    def add(
        self,
        account: Account | None,
        ident: str,
        conversation: Any,
        body: Mapping[str, Any] | None = None,
        inputs: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Store a response, unless it takes more than ``MAX_ENTRY_BYTES``.

        Args:
            account: Account of the request; ``None`` without API keys.
            ident: Identifier of the response.
            conversation: The conversation, including the response: messages of a chat, or a thread.
            body: The response object; ``None`` of threads.
            inputs: Items of the response's input.
        """
        outputs = {item["id"]: _encode(item) for item in body["output"]} if body is not None else {}
        rest = None
        if body is not None:
            rest = _encode({name: item for name, item in body.items() if name != "output"})
        entry = _Kept(_encode(conversation), rest, [(item["id"], _encode(item)) for item in inputs], outputs)
        owner = _owner(account)
        if entry.size > MAX_ENTRY_BYTES:
            return
        kept = self._kept.setdefault(owner, OrderedDict())
        kept[ident] = entry
        self._items.update(((owner, item_id), ident) for item_id in outputs)
        self._sizes[owner] = self._sizes.get(owner, 0) + entry.size
        while len(kept) > MAX_RESPONSES or self._sizes[owner] > MAX_BYTES:
            self._drop(owner, next(iter(kept)))
        while sum(self._sizes.values()) > MAX_TOTAL_BYTES:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._drop(largest, next(iter(self._kept[largest])))
        self._report()

    def messages(self, account: Account | None, ident: str) -> list[dict[str, Any]]:
        """Return the conversation, including a response.

        Raises:
            NotFoundError: The account has no such response, or not any more.
        """
        found = self._find(account, ident, "previous_response_id")
        messages: list[dict[str, Any]] = orjson.loads(found.conversation)
        return messages

    def thread(self, account: Account | None, ident: str) -> dict[str, Any]:
        """Return the thread that ends with a response.

        Raises:
            NotFoundError: The account has no such thread, or not any more.
        """
        kept = self._entry(account, ident)
        if kept is None or kept.body is not None:
            name = "thread.previous_message_id"
            raise NotFoundError(f"{name}: there is no thread with {shown(ident)} here (any more)", field=name)
        thread: dict[str, Any] = orjson.loads(kept.conversation)
        return thread

    def item(self, account: Account | None, item_id: str, field: str) -> bytes:
        """Return an output item of a response as JSON.

        Args:
            account: Account of the request; ``None`` without API keys.
            item_id: Identifier of the item.
            field: Name of the field that has the identifier.

        Raises:
            NotFoundError: The account has no such item, or not any more; names the field.
        """
        ident = self._items.get((_owner(account), item_id))
        if ident is None:
            raise NotFoundError(f"{field}: there is no item {shown(item_id)} here (any more)", field=field)
        return self._kept[_owner(account)][ident].outputs[item_id]

    def body(self, account: Account | None, ident: str) -> bytes:
        """Return a response as JSON.

        Raises:
            NotFoundError: The account has no such response, or not any more.
        """
        kept = self._find(account, ident, "response_id")
        assert kept.body is not None  # a thread's is not found
        return b'%b,"output":[%b]}' % (kept.body[:-1], b",".join(kept.outputs.values()))

    def delete(self, account: Account | None, ident: str) -> None:
        """Delete a response.

        Raises:
            NotFoundError: The account has no such response, or not any more.
        """
        self._find(account, ident, "response_id")
        self._drop(_owner(account), ident)
        self._report()

    async def serve(self, request: Request) -> Response:
        """Serve ``GET`` and ``DELETE`` of ``/v1/responses/{response_id}``."""
        ident = request.path_params["response_id"]
        account = account_of(request)
        if request.method == "DELETE":
            self.delete(account, ident)
            return json_response({"id": ident, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false") not in ("false", "0"):
            raise InvalidRequestError("stream: a response that is kept comes in one piece", field="stream")
        self._readers.check(_owner(account))
        return self._readers.whole(self.body(account, ident), _owner(account))

    async def list_inputs(self, request: Request) -> Response:
        """Serve ``GET`` of ``/v1/responses/{response_id}/input_items``."""
        ident = request.path_params["response_id"]
        self._readers.check(_owner(account_of(request)))
        items = list(self._find(account_of(request), ident, "response_id").inputs)
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequestError(f"order must be asc or desc, got {shown(order)}", field="order")
        limit = query.get("limit", "20")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= _MAX_LISTED):
            raise InvalidRequestError(f"limit must be between 1 and {_MAX_LISTED}, got {shown(limit)}", field="limit")
        if order == "desc":
            items.reverse()
        if "after" in query:
            places = [at for at, (item_id, _) in enumerate(items) if item_id == query["after"]]
            if not places:
                raise NotFoundError(f"after: there is no item {shown(query['after'])} in it", field="after")
            items = items[places[0] + 1 :]
        page = items[: int(limit)]
        ends = {"first_id": page[0][0], "last_id": page[-1][0]} if page else {"first_id": "", "last_id": ""}
        data = [orjson.Fragment(item) for _, item in page]
        answer = {"object": "list", "data": data, **ends, "has_more": len(items) > len(page)}
        return self._readers.whole(orjson.dumps(answer), _owner(account_of(request)))

    async def cancel(self, request: Request) -> Response:
        """Serve ``POST`` of ``/v1/responses/{response_id}/cancel``: what is stored has ended."""
        self._find(account_of(request), request.path_params["response_id"], "response_id")
        raise InvalidRequestError("response_id: only background responses can be cancelled", field="response_id")

    def _entry(self, account: Account | None, ident: str) -> _Kept | None:
        kept = self._kept.get(_owner(account))
        return None if kept is None else kept.get(ident)

    def _find(self, account: Account | None, ident: str, name: str) -> _Kept:
        """Return what is stored of a response."""
        kept = self._entry(account, ident)
        if kept is None or kept.body is None:
            raise NotFoundError(f"{name}: there is no response {shown(ident)} here (any more)", field=name)
        return kept

    def _drop(self, owner: str, ident: str) -> None:
        entry = self._kept[owner].pop(ident)
        self._sizes[owner] -= entry.size
        for item_id in entry.outputs:
            del self._items[owner, item_id]
        if not self._kept[owner]:
            del self._kept[owner], self._sizes[owner]

    def _report(self) -> None:
        self._on_change(sum(map(len, self._kept.values())), sum(self._sizes.values()))


def _owner(account: Account | None) -> str:
    return "" if account is None else account.name
