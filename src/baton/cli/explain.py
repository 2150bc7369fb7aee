"""``baton explain``: why a request went where it went, as its router remembers it."""

from __future__ import annotations

import argparse
import http.client
import json
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from datetime import datetime
from email.message import Message
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.config.secrets import shown_url
from baton.errors import BatonError, ConfigError, NotFoundError, UnauthenticatedError, UnavailableError

_NOTHING = "-"
_MAX_ANSWER_BYTES = 32 * 2**20


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("explain", help="why a request went where it went; without an id: the latest requests")
    text = "the answer's id, its x-request-id, or the id in the instances' logs"
    parser.add_argument("request_id", metavar="REQUEST_ID", nargs="?", default="", help=text)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the router (default: http://127.0.0.1:8000)")
    parser.add_argument("--api-key-file", default="", help="file whose first line is an API key of the router")
    parser.add_argument("--tls-ca", default="", help="authority of the router's certificate; default: the system's")
    parser.add_argument(
        "--tls-name", default="", help="name that its certificate must have; default: the host of --url"
    )
    parser.add_argument("--limit", type=int, default=20, help="requests to list at most (default: 20)")
    parser.add_argument("--timeout-s", type=float, default=10.0, help="seconds to wait for an answer (default: 10)")
    parser.add_argument("--json", action="store_true", help="print what the router answers")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask and print; returns the exit status.

    Raises:
        ConfigError: The arguments cannot work.
        BatonError: No such request, or no answer.
    """
    ask = _asker(args)
    if args.request_id:
        answer = ask("/debug/decisions/" + urllib.parse.quote(args.request_id, safe=""))
    else:
        answer = ask(f"/debug/decisions?limit={args.limit}")
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    if args.request_id:
        print_explanation(Console(highlight=False), answer)
    else:
        print_list(answer)
    return 0


# --- asking ---


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nobody: the API key is for the router that was named."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message[str, str], newurl: str
    ) -> None:
        """Refuse."""


class _NamedHost(urllib.request.HTTPSHandler):
    """Dials the host of the URL, and wants a certificate for ``name``, if one is given."""

    def __init__(self, context: ssl.SSLContext, name: str) -> None:
        super().__init__(context=context)
        self._tls, self._name = context, name

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Open a connection."""

        def connection(host: str, **options: Any) -> http.client.HTTPSConnection:
            made = http.client.HTTPSConnection(host, context=self._tls, **options)
            if self._name:
                made.connect = lambda: self._connect(made)  # type: ignore[method-assign]
            return made

        return self.do_open(connection, req)

    def _connect(self, connection: http.client.HTTPSConnection) -> None:
        http.client.HTTPConnection.connect(connection)
        connection.sock = self._tls.wrap_socket(connection.sock, server_hostname=self._name)


def _asker(args: argparse.Namespace) -> Callable[[str], Any]:
    """Return what asks the router for a path.

    Raises:
        ConfigError: The arguments cannot work.
    """
    url = urllib.parse.urlsplit(args.url)
    if url.scheme not in {"http", "https"} or not url.hostname or url.query or url.fragment:
        raise ConfigError(f"--url must look like http://127.0.0.1:8000, got {shown_url(args.url)!r}", field="url")
    if not args.timeout_s > 0:
        raise ConfigError("--timeout-s must be above 0", field="timeout_s")
    if not 1 <= args.limit <= 500:
        raise ConfigError(f"--limit must be between 1 and 500, got {args.limit}", field="limit")
    headers = {"accept": "application/json"}
    if args.api_key_file:
        headers["authorization"] = f"Bearer {_read_key(args.api_key_file)}"
    # No proxies from the environment: the router is where --url says.
    secure = _NamedHost(_context(args.tls_ca), args.tls_name)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect, secure)

    def ask(path: str) -> Any:
        request = urllib.request.Request(args.url.rstrip("/") + path, headers=headers)
        try:
            with opener.open(request, timeout=args.timeout_s) as answer:
                return json.loads(answer.read(_MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error, shown_url(args.url)) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UnavailableError(f"no answer of a router from {shown_url(args.url)}: {reason}") from error

    return ask


def _context(authority: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authority or None)
    except OSError as error:  # ssl's own errors too
        raise ConfigError(f"cannot read the authority {authority}: {error}", field="tls_ca") from error


def _read_key(path: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the API key file {path}: {error.strerror}", field="api_key_file") from error
    key = next((line.strip() for line in lines if line.strip() and not line.startswith("#")), "")
    if not (key and key.isascii() and key.isprintable()):
        raise ConfigError(f"the API key file {path} has no usable key", field="api_key_file")
    return key


def _refused(error: urllib.error.HTTPError, url: str) -> BatonError:
    if error.code == 401:
        return UnauthenticatedError(f"{url} wants an API key: give --api-key-file")
    try:
        message = json.loads(error.read(2**16))["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        message = f"{url} answers {error.code}; is it a router?"
    return (NotFoundError if error.code == 404 else UnavailableError)(_plain(message))


# --- printing ---


def print_list(answer: dict[str, Any]) -> None:
    """Print requests in one line each, however narrow the terminal: the last column is for copying."""
    if not answer["decisions"]:
        print("no requests yet")
        return
    rows = [["time", "prefill", "decode", "path", "match", "TTFT", "KV", "outcome", "request"]]
    for x in answer["decisions"]:
        came = datetime.fromtimestamp(x["time"]).strftime("%H:%M:%S")
        numbers = (_percent(x["match_rate"]), _ms(x["ttft_ms"]), _bytes(x["kv_bytes"]))
        rows.append(
            [_plain(v) for v in (came, x["prefill"], x["decode"], x["path"], *numbers, x["outcome"], _name(x["id"]))]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _name(request_id: str) -> str:
    """Return what the client knows a request by; ``baton explain`` takes it, too."""
    head, _, tail = request_id.rpartition("-")
    return head if re.fullmatch("[0-9a-f]{32}", tail) else request_id


def print_explanation(console: Console, x: dict[str, Any]) -> None:
    """Print everything that is known of a request."""
    console.print(_cell(x["id"]), style="bold", soft_wrap=True)
    console.print(f"{_plain(x['time_iso'])}, {_plain(x['outcome'])}\n", markup=False)
    for line in x["why"]:
        console.print(Text("- ") + _cell(line))
    for at, placement in enumerate(x["placements"], 1):
        for role in ("decode", "prefill"):
            rows = [row for row in placement["candidates"] if row["role"] == role]
            if rows:
                console.print()
                console.print(_candidates(at, placement, role, rows))
    console.print()
    console.print(_facts(x))
    if x["others"]:
        console.print(f"\n{len(x['others'])} more of this name: ", _cell(", ".join(x["others"])))


def _candidates(at: int, placement: dict[str, Any], role: str, rows: list[dict[str, Any]]) -> Table:
    which = f"{at}. placement, after {_ms(placement['at_ms'])}: " if at > 1 else ""
    title = f"{which}{role}, index {_plain(placement['index_state'])}"
    table = Table(caption=Text(title), caption_justify="left")
    terms = list(dict.fromkeys(name for row in rows for name in row["terms"]))
    table.add_column("instance")
    for name in ("match", "load x mean", *(f"+ {term}" for term in terms), "= score"):
        table.add_column(_cell(name), justify="right")
    table.add_column("")
    for row in rows:
        values = (row["load"], *(row["terms"].get(name) for name in terms), row["score"])
        table.add_row(
            _cell(row["instance"]),
            _percent(row["match_rate"]),
            *(_number(value) for value in values),
            "chosen" if row["winner"] else "",
            style="bold" if row["winner"] else None,
        )
    return table


def _facts(x: dict[str, Any]) -> Table:
    trace = x["trace"] or {}
    table = Table(show_header=False)
    came = f"{trace.get('cached_tokens', 0)} cached, {trace.get('transferred_tokens', 0)} transferred, "
    moved = f"{_bytes(trace['kv_bytes'])} in {_ms(trace['transfer_ms'])}" if trace.get("kv_bytes") else "none"
    for name, value in (
        ("TTFT / whole time", f"{_ms(x['ttft_ms'])} / {_ms(x['duration_ms'])}"),
        ("path", f"{x['path'] or _NOTHING}" + (f" ({x['reason']})" if x["reason"] else "")),
        ("prefill -> decode", f"{x['prefill'] or _NOTHING} -> {x['decode'] or _NOTHING}"),
        ("pipe", trace.get("pipe")),
        ("KV moved", moved),
        ("transfer added to TTFT", _ms(trace.get("exposed_ms"))),
        ("queue on decode", _ms(trace.get("queue_ms"))),
        ("prompt tokens", f"{x['prompt_tokens']}: {came}{trace.get('recomputed_tokens', 0)} computed on decode"),
        ("generated tokens", str(x["generated_tokens"])),
        ("migrations / preemptions", f"{trace.get('migrations', 0)} / {trace.get('preemptions', 0)}"),
        ("prefills tried in vain", ", ".join(trace.get("failed_prefills", ())) or "none"),
    ):
        table.add_row(name, _cell(value))
    return table


def _plain(value: object) -> str:
    """Text that came over the network, without what a terminal would obey."""
    if value in (None, ""):
        return _NOTHING
    return "".join(char if char.isprintable() else "\ufffd" for char in str(value))


def _cell(value: object) -> Text:
    return Text(_plain(value))


def _percent(share: float | None) -> str:
    return _NOTHING if share is None else f"{share:.0%}"


def _ms(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.1f} ms"


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"


def _bytes(value: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
