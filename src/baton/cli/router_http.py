"""Asking a router over HTTP: its address, key and certificate, as flags; and text that came from it, made plain."""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import IO, Any

from baton.config.secrets import shown_url
from baton.errors import BatonError, ConfigError, NotFoundError, UnauthenticatedError, UnavailableError

NOTHING = "-"
HINT = "is one running there? start one with baton up, or name another with --url"
_MAX_ANSWER_BYTES = 32 * 2**20


def add_http_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where a router is."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the router (default: http://127.0.0.1:8000)")
    parser.add_argument("--api-key-file", default="", help="file whose first line is an API key of the router")
    parser.add_argument("--tls-ca", default="", help="authority of the router's certificate; default: the system's")
    parser.add_argument(
        "--tls-name", default="", help="name that its certificate must have; default: the host of --url"
    )
    parser.add_argument("--timeout-s", type=float, default=10.0, help="seconds to wait for an answer (default: 10)")


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


def http_asker(args: argparse.Namespace) -> Callable[[str], Any]:
    """Return what asks a router for a path and returns the JSON that it answers.

    Raises:
        ConfigError: The arguments cannot work.
    """
    try:
        url = urllib.parse.urlsplit(args.url)
        usable = url.scheme in {"http", "https"} and bool(url.hostname) and not (url.query or url.fragment)
        usable = usable and url.port != 0  # looks whether it is one
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"--url must look like http://127.0.0.1:8000, got {shown_url(args.url)!r}", field="url")
    if not args.timeout_s > 0:
        raise ConfigError("--timeout-s must be above 0", field="timeout_s")
    headers = {"accept": "application/json"}
    if args.api_key_file:
        headers["authorization"] = f"Bearer {read_api_key(args.api_key_file)}"
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


def read_api_key(path: str) -> str:
    """Return the first line of a file that is no comment.

    Raises:
        ConfigError: It cannot be read, or has none.
    """
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
    return (NotFoundError if error.code == 404 else UnavailableError)(plain(message))


def plain(value: object) -> str:
    """Text that came over the network, without what a terminal would obey."""
    if value in (None, ""):
        return NOTHING
    return "".join(char if char.isprintable() else "\ufffd" for char in str(value))
