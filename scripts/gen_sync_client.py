"""Generates the synchronous client from the asynchronous one: ``src/baton/client/sync_client.py``.

Signatures and docs are those of ``AsyncClient``; a method's body runs the asynchronous one in the client's portal.
``--check`` exits with 1 if the file is not up to date, as ``make lint`` does.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "baton" / "client" / "async_client.py"
TARGET = SOURCE.with_name("sync_client.py")
TIMEOUTS = {"drain": "wait + self._timeout", "scale": "LONG_CALL_S"}
"""Deadlines of methods without ``timeout``, for which the client's own is too short."""
CLASS_DOC = '''"""Client of a Baton router, over gRPC.

    May be used from several threads, which share one background thread and its connection. Close it, or use it as a
    context manager. A client that was used does not survive a fork: create one in each process::

        with baton.Client("127.0.0.1:8001") as client:
            print(client.generate("def main():", max_tokens=32).text)
'''
HEADER = '''"""The synchronous client.

Generated from ``async_client.py`` by ``scripts/gen_sync_client.py``: do not edit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

from baton.client.async_client import AsyncClient
from baton.client.portal import LONG_CALL_S, PortalClient, Stream
from baton.client.request import Options, Prompt
from baton.client.scaling import Switch
from baton.client.settings import DEFAULT_RETRIES, DEFAULT_TIMEOUT_S
from baton.client.types import Generation, Instance, Model, RouteDecision, Stats
from baton.errors import BatonError
from baton.rpc.tls import Tls
from baton.types import Role


'''


def sync_text(text: str) -> str:
    """Return a part of the asynchronous client in the synchronous one's words."""
    text = text.replace("AsyncClient", "Client").replace("AsyncStream", "Stream")
    return re.sub(r"AsyncGenerator\[(.*), None\]", r"Iterator[\1]", text)


def call_arguments(function: ast.AsyncFunctionDef | ast.FunctionDef) -> str:
    """Return the arguments that pass a function's parameters on."""
    arguments = function.args
    passed = [argument.arg for argument in arguments.args if argument.arg != "self"]
    passed += [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
    passed += [f"**{arguments.kwarg.arg}"] if arguments.kwarg is not None else []
    return ", ".join(passed)


def make_body(function: ast.AsyncFunctionDef) -> str:
    """Return the body of a synchronous method."""
    names = [argument.arg for argument in function.args.kwonlyargs]
    arguments = call_arguments(function)
    returns = ast.unparse(function.returns) if function.returns is not None else "None"
    if "stream" in names:
        asked = arguments.replace("stream=stream", "stream={}")
        whole = f"return self._call(self._core.{function.name}({asked.format('False')}), timeout)"
        opening = f"return self._open_stream(self._core.{function.name}({asked.format('True')}), timeout)"
        return f"if not stream:\n    {whole}\n{opening}"
    call = f"self._core.{function.name}({arguments})"
    if returns.startswith("AsyncGenerator"):
        return f"return self._iterate({call}, timeout)"
    timeout = "timeout" if "timeout" in names else TIMEOUTS.get(function.name, "")
    body = f"self._call({call}, {timeout})" if timeout else f"self._call({call})"
    return body if returns == "None" else f"return {body}"


def signature(lines: list[str], function: ast.AsyncFunctionDef | ast.FunctionDef) -> str:
    """Return a function's decorators and signature, as written, for a synchronous function."""
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    text = "\n".join(lines[first - 1 : function.body[0].lineno - 1])
    return sync_text(text.replace("async def", "def"))


def docstring(lines: list[str], function: ast.AsyncFunctionDef) -> str:
    """Return a function's docstring, as written."""
    node = function.body[0]
    assert node.end_lineno is not None
    return sync_text("\n".join(lines[node.lineno - 1 : node.end_lineno]))


def generate() -> str:
    """Return the synchronous client's source."""
    source = SOURCE.read_text()
    lines = source.splitlines()
    (client,) = [
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "AsyncClient"
    ]
    class_doc = ast.get_docstring(client, clean=False) or ""
    arguments_doc = class_doc[class_doc.index("    Args:") :]
    out = [f'class Client(PortalClient):\n    {CLASS_DOC}\n{arguments_doc}"""']
    for node in client.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            core = call_arguments(node)
            out.append(f"{signature(lines, node)}\n        super().__init__(AsyncClient({core}), timeout)")
        if not isinstance(node, ast.AsyncFunctionDef) or node.name.startswith("_") or node.name == "close":
            continue
        if any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list):
            end = node.end_lineno
            first = node.decorator_list[0].lineno
            out.append(sync_text("\n".join(lines[first - 1 : end]).replace("async def", "def")))
            continue
        body = "\n".join(f"        {line}" for line in make_body(node).splitlines())
        out.append(f"{signature(lines, node)}\n{docstring(lines, node)}\n{body}")
    return format_source(HEADER + "\n\n".join(out) + "\n")


def format_source(source: str) -> str:
    """Return a source as ruff formats it."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def main() -> int:
    """Write or check the synchronous client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the file is not up to date")
    args = parser.parse_args()
    source = generate()
    if not args.check:
        TARGET.write_text(source)
    elif TARGET.read_text() != source:
        print(f"{TARGET.relative_to(ROOT)} is not up to date: run scripts/gen_sync_client.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
