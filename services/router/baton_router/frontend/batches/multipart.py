"""``multipart/form-data`` as it arrives, part by part: a file is never whole in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from baton.errors import InvalidRequestError

MAX_HEADERS_BYTES = 8192
MAX_PARTS = 32
_BOUNDARY = re.compile(r"""multipart/form-data\s*;.*?\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))""", re.IGNORECASE)
_DISPOSITION = re.compile(rb"content-disposition:\s*form-data\b(.*)", re.IGNORECASE)
_PARAMETER = re.compile(rb';\s*(filename|name)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
_ESCAPED = re.compile(rb"\\(.)")


class FormPart(NamedTuple):
    """The beginning of a part.

    Attributes:
        name: Name of the field.
        filename: Name of the file; ``None``: it is a plain value.
    """

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes:
    """Return the boundary of a body.

    Raises:
        InvalidRequestError: The type is another one, or has no boundary.
    """
    match = _BOUNDARY.match(content_type)
    if match is None:
        raise InvalidRequestError("the body must be multipart/form-data with a boundary", field="file")
    return (match[1] or match[2]).encode("latin-1")


class MultipartParser:
    """Splits a body into its parts.

    Args:
        boundary: Boundary of the parts.

    Attributes:
        done: Whether the last part is complete.
    """

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._data = b"\r\n"  # the first delimiter has no line before it
        self._in_headers = False
        self._in_part = False
        self._num_parts = 0
        self.done = False

    def feed(self, data: bytes) -> Iterator[FormPart | bytes]:
        """Yield what more of the body brings: beginnings of parts, and pieces of their content.

        Raises:
            InvalidRequestError: The body is malformed.
        """
        self._data += data
        while not self.done:
            if self._in_headers:
                head, end, rest = self._data.partition(b"\r\n\r\n")
                if len(head) > MAX_HEADERS_BYTES:
                    raise InvalidRequestError("a part of the form has too long headers", field="file")
                if not end:
                    return
                self._in_headers, self._in_part, self._data = False, True, rest
                self._num_parts += 1
                if self._num_parts > MAX_PARTS:
                    raise InvalidRequestError(f"the form has more than {MAX_PARTS} parts", field="file")
                yield _read_head(head)
            at = self._data.find(self._delimiter)
            if at < 0:
                keep = len(self._delimiter) - 1
                piece, self._data = self._data[:-keep], self._data[-keep:]
                yield from self._content(piece)
                return
            after = at + len(self._delimiter)
            if len(self._data) < after + 2:
                return
            yield from self._content(self._data[:at])
            self.done = self._data[after : after + 2] == b"--"
            if not self.done and self._data[after : after + 2] != b"\r\n":
                raise InvalidRequestError("the form is malformed behind a boundary", field="file")
            self._in_headers, self._in_part, self._data = True, False, self._data[after + 2 :]

    def _content(self, piece: bytes) -> Iterator[bytes]:
        if piece and self._in_part:
            yield piece


def _read_head(head: bytes) -> FormPart:
    for line in head.split(b"\r\n"):
        if match := _DISPOSITION.match(line):
            values = {name.lower(): _ESCAPED.sub(rb"\1", value) for name, value in _PARAMETER.findall(match[1])}
            if b"name" in values:
                filename = values.get(b"filename")
                return FormPart(
                    values[b"name"].decode(errors="replace"),
                    None if filename is None else filename.decode(errors="replace"),
                )
    raise InvalidRequestError("a part of the form has no name", field="file")
