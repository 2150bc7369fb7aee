"""HPACK, the compression of headers in HTTP/2 (RFC 7541), for an end whose settings forbid a dynamic table.

It only decodes headers of the static table and literal ones, some of them in the Huffman code of appendix B. That code
is canonical: codes of one length are consecutive by symbol, so their lengths define it.
"""

from __future__ import annotations

from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

MAX_LIST_BYTES = 16 * 1024
"""Maximum size of one block: names, values, and 32 bytes for each header (RFC 9113, 6.5.2)."""
_ENTRY_BYTES = 32
_STATIC_NAMES = (
    b":authority :method :method :path :path :scheme :scheme :status :status :status :status :status :status :status "
    b"accept-charset accept-encoding accept-language accept-ranges accept access-control-allow-origin age allow "
    b"authorization cache-control content-disposition content-encoding content-language content-length "
    b"content-location content-range content-type cookie date etag expect expires from host if-match "
    b"if-modified-since if-none-match if-range if-unmodified-since last-modified link location max-forwards "
    b"proxy-authenticate proxy-authorization range referer refresh retry-after server set-cookie "
    b"strict-transport-security transfer-encoding user-agent vary via www-authenticate"
).split()
_STATIC_VALUES = {
    **dict(enumerate((b"GET", b"POST", b"/", b"/index.html", b"http", b"https"), 1)),
    **dict(enumerate((b"200", b"204", b"206", b"304", b"400", b"404", b"500"), 7)),
    15: b"gzip, deflate",
}
_STATIC = [(name, _STATIC_VALUES.get(at, b"")) for at, name in enumerate(_STATIC_NAMES)]
# fmt: off
_CODE_LENGTHS = (
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28,
    28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5,
    6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23,
    21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25,
    19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
    30,
)
# fmt: on
"""Bits of each byte's code, and of the end marker's, which is never sent."""
_END = 256
_MAX_NUMBER = 1 << 24


class HpackError(ValueError):
    """A block of headers cannot be read."""


def encode(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode headers as literals without indexing.

    Args:
        headers: Names, in lower case, and values.
    """
    out = bytearray()
    for name, value in headers:
        out.append(0)
        for text in (name, value):
            _write_number(out, 7, len(text))
            out += text
    return bytes(out)


def decode(block: bytes) -> Headers:
    """Decode a block of headers.

    Raises:
        HpackError: It is malformed, refers to the dynamic table, or decodes to more than ``MAX_LIST_BYTES``.
    """
    headers: Headers = []
    at = size = 0
    try:
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _number(block, at, 7)
                header = _entry(index)
            elif first & 0xE0 == 0x20:  # a size of the dynamic table, which this end's settings fix at 0
                kept, at = _number(block, at, 5)
                if kept:
                    raise HpackError("headers would be kept")
                continue
            else:
                index, at = _number(block, at, 6 if first & 0x40 else 4)
                name = _entry(index)[0] if index else b""
                if not index:
                    name, at = _text(block, at)
                value, at = _text(block, at)
                header = name, value
            size += len(header[0]) + len(header[1]) + _ENTRY_BYTES
            if size > MAX_LIST_BYTES:
                raise HpackError(f"headers have more than {MAX_LIST_BYTES} bytes")
            headers.append(header)
    except IndexError as error:
        raise HpackError("headers end too early") from error
    return headers


def _entry(index: int) -> tuple[bytes, bytes]:
    if not 1 <= index <= len(_STATIC):
        raise HpackError(f"header {index} is in no table")
    return _STATIC[index - 1]


def _write_number(out: bytearray, bits: int, value: int) -> None:
    most = (1 << bits) - 1
    if value < most:
        out.append(value)
        return
    out.append(most)
    value -= most
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _number(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """Decode an integer with a prefix of ``bits`` bits (RFC 7541, 5.1); returns it and the offset behind it."""
    value = block[at] & ((1 << bits) - 1)
    at += 1
    if value < (1 << bits) - 1:
        return value, at
    shift = 0
    while True:
        value += (block[at] & 0x7F) << shift
        if value > _MAX_NUMBER:
            raise HpackError("a number of headers is too large")
        shift += 7
        at += 1
        if not block[at - 1] & 0x80:
            return value, at
        if shift > 28:
            raise HpackError("a number of headers is too long")


def _text(block: bytes, at: int) -> tuple[bytes, int]:
    coded = block[at] & 0x80
    length, at = _number(block, at, 7)
    text = block[at : at + length]
    if len(text) < length:
        raise HpackError("headers end too early")
    return _unpack(text) if coded else text, at + length


def _codes() -> dict[tuple[int, int], int]:
    """Return the symbol of each code, by the code's length and value."""
    codes: dict[tuple[int, int], int] = {}
    code = length = 0
    for bits, symbol in sorted((bits, symbol) for symbol, bits in enumerate(_CODE_LENGTHS)):
        code <<= bits - length
        length = bits
        codes[bits, code] = symbol
        code += 1
    return codes


_SYMBOLS = _codes()


def _unpack(data: bytes) -> bytes:
    """Decode a string in the Huffman code."""
    out = bytearray()
    code = bits = 0
    for byte in data:
        for at in range(7, -1, -1):
            code = code << 1 | byte >> at & 1
            bits += 1
            symbol = _SYMBOLS.get((bits, code))
            if symbol is None:
                continue
            if symbol == _END:
                raise HpackError("a string of headers has the code of its end")
            out.append(symbol)
            code = bits = 0
    if bits > 7 or code != (1 << bits) - 1:
        raise HpackError("a string of headers is not padded as it should be")
    return bytes(out)
