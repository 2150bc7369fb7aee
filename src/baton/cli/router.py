"""Access to a router over HTTP or gRPC: its address, key and certificates as flags."""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import urllib.parse
from typing import Any, Protocol, TypedDict, TypeVar

import httpx
import msgspec

from baton.cli.printable import MAX_ERROR_CHARS, clean, one_line
from baton.client import AsyncClient, Client
from baton.config import add_flags, from_flags
from baton.config.files import read_small_file
from baton.config.flags import AccessConfig
from baton.config.secrets import shown_url
from baton.errors import BatonError, ConfigError, NotFoundError, UnauthenticatedError, UnavailableError
from baton.rpc.tls import read_tls

T = TypeVar("T")

HTTP_HINT = "is one running there? start one with baton up, or name another with --url"
_MAX_ANSWER_BYTES = 32 * 2**20


def add_http_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the HTTP address of a router."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the router (default: http://127.0.0.1:8000)")
    parser.add_argument("--api-key-file", default="", help="file whose first line is an API key of the router")
    parser.add_argument("--tls-ca", default="", help="authority of the router's certificate; default: the system's")
    parser.add_argument(
        "--tls-name", default="", help="name that its certificate must have; default: the host of --url"
    )
    parser.add_argument("--timeout-s", type=float, default=10.0, help="seconds for a whole answer (default: 10)")


class Asker(Protocol):
    """Asks a router over HTTP."""

    def __call__(self, path: str, kind: type[T]) -> tuple[Any, T]:
        """Get a path; returns the parsed JSON as it came, and checked: of a type, its texts fit to be printed.

        Raises:
            NotFoundError: There is no such thing.
            UnauthenticatedError: The router wants another API key.
            UnavailableError: There is no such answer in time.
        """
        ...


def http_asker(args: argparse.Namespace) -> Asker:
    """Return what asks the router of the flags.

    Raises:
        ConfigError: An argument is invalid.
    """
    try:
        url = urllib.parse.urlsplit(args.url)
        usable = url.scheme in {"http", "https"} and bool(url.hostname) and not (url.query or url.fragment)
        usable = usable and url.port != 0  # raises if the port is no number
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"--url must look like http://127.0.0.1:8000, got {shown_url(args.url)!r}", field="url")
    if not args.timeout_s > 0:
        raise ConfigError("--timeout-s must be above 0", field="timeout_s")
    headers = {"accept": "application/json", "accept-encoding": "identity"}
    if args.api_key_file:
        headers["authorization"] = f"Bearer {read_api_key(args.api_key_file)}"
    # Neither proxies from the environment nor redirects: the key is for the router that --url names.
    options: dict[str, Any] = {"sni_hostname": args.tls_name} if args.tls_name else {}
    verify = _context(args.tls_ca)
    shown = shown_url(args.url)

    async def get(path: str) -> tuple[int, bytes]:
        body = bytearray()
        async with (
            asyncio.timeout(args.timeout_s),  # of the whole answer: a peer may send a byte at a time
            httpx.AsyncClient(headers=headers, verify=verify, timeout=None, trust_env=False) as client,
            client.stream("GET", args.url.rstrip("/") + path, extensions=options) as answer,
        ):
            async for part in answer.aiter_raw():
                body += part
                if len(body) > _MAX_ANSWER_BYTES:
                    raise UnavailableError(f"{shown} answers more than {_MAX_ANSWER_BYTES} bytes; is it a router?")
            return answer.status_code, bytes(body)

    def ask(path: str, kind: type[T]) -> tuple[Any, T]:
        try:
            status, body = asyncio.run(get(path))
        except TimeoutError as error:
            text = f"no whole answer of a router from {shown} within {args.timeout_s:g} s"
            raise UnavailableError(text) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            why = one_line(str(error), MAX_ERROR_CHARS) or type(error).__name__
            raise UnavailableError(f"no answer of a router from {shown}: {why}") from error
        if not 200 <= status < 300:
            raise _refused(status, body, shown)
        try:
            return _parse(body, kind)
        except ValueError as error:
            why = one_line(str(error), MAX_ERROR_CHARS)
            raise UnavailableError(f"{shown} gives no router's answer: {why}; is it a router?") from error

    return ask


def _parse(body: bytes, kind: type[T]) -> tuple[Any, T]:
    """Return an answer's JSON as it came, and checked.

    Raises:
        ValueError: It is no JSON, or not of this type.
    """
    try:
        parsed = json.loads(body)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return parsed, msgspec.convert(clean(parsed), kind)


def _context(authority: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authority or None)
    except OSError as error:  # ssl's own errors too
        raise ConfigError(f"cannot read the authority {authority}: {error}", field="tls_ca") from error


def read_api_key(path: str) -> str:
    """Return the API key in a file: the first line that is no comment.

    Raises:
        ConfigError: The file cannot be read, or has no usable key.
    """
    lines = read_small_file(path, "the API key file", "api_key_file", pipes=True).decode(errors="replace").splitlines()
    key = next((line.strip() for line in lines if line.strip() and not line.startswith("#")), "")
    if not (key and key.isascii() and key.isprintable()):
        raise ConfigError(f"the API key file {path} has no usable key", field="api_key_file")
    return key


class _Error(TypedDict):
    message: str


class _Refusal(TypedDict):
    error: _Error


def _refused(status: int, body: bytes, url: str) -> BatonError:
    if status == 401:
        return UnauthenticatedError(f"{url} wants an API key: give --api-key-file")
    try:
        message = one_line(_parse(body, _Refusal)[1]["error"]["message"], MAX_ERROR_CHARS)
    except ValueError:
        message = f"{url} answers {status}; is it a router?"
    return (NotFoundError if status == 404 else UnavailableError)(message)


GRPC_HINT = "is one running there? start one with baton up, or name another with --address"


def add_grpc_flags(parser: argparse.ArgumentParser, *, timeout_s: float = 600.0) -> None:
    """Add the flags for the gRPC address of a router."""
    parser.add_argument(
        "--address", default="127.0.0.1:8001", metavar="HOST:PORT", help="the router (default: 127.0.0.1:8001)"
    )
    parser.add_argument("--api-key-file", default="", help="file whose first line is an API key of the router")
    text = f"seconds that a call may take (default: {timeout_s:g})"
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help=text)
    add_flags(parser, AccessConfig)
    parser.set_defaults(hint=GRPC_HINT)


def open_client(args: argparse.Namespace) -> Client:
    """Return a client of the router.

    Raises:
        ConfigError: A file cannot be read.
        InvalidRequestError: The address or the timeout is invalid.
    """
    return Client(args.address, **_options(args))


def open_async_client(args: argparse.Namespace) -> AsyncClient:
    """Return a client of the router, for an event loop; raises as :func:`open_client` does."""
    return AsyncClient(args.address, **_options(args))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    config = from_flags(AccessConfig, args)
    key = read_api_key(args.api_key_file) if args.api_key_file else None
    if key is not None and "token_file" in args:
        raise ConfigError("give --api-key-file or --token-file", field="api_key_file")
    token_file = "" if key is not None else config.token_file
    return {"token": key, "token_file": token_file, "timeout": args.timeout_s, "tls": read_tls(config)}
