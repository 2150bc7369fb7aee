"""The token that services share. It is never sent: peers only see HMACs under keys derived from it."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Sequence

from baton.config.secrets import file_stamp, read_secret_file, require_unguessable
from baton.errors import ConfigError
from baton.rpc.audit import audit

log = logging.getLogger(__name__)

MAX_TOKENS = 4
_LOOK_S = 1.0


class Token:
    """The shared secret of the services; see :func:`read_token`.

    Args:
        tokens: Tokens, 1 to ``MAX_TOKENS``: the first is used for proofs, all are accepted.
        path: File with the tokens, one per line, which is read again when it changes; empty: none.

    Raises:
        ConfigError: There is none, or there are too many.
    """

    def __init__(self, *tokens: str, path: str = "") -> None:
        self._tokens = _checked(tokens, path)
        self._path = path
        self._lock = threading.Lock()
        self._keys: dict[bytes, tuple[bytes, ...]] = {}
        self._generation = 0
        self._seen = file_stamp(path)
        self._looked = time.monotonic()

    def __repr__(self) -> str:
        return f"Token(path={self._path!r})"  # a token has no place in a log

    @property
    def generation(self) -> int:
        """How often the file was read again; proofs of an earlier generation must be repeated."""
        self._refresh()
        return self._generation

    def keys(self, purpose: bytes) -> tuple[bytes, ...]:
        """Return one key per token for a purpose; MACs of one purpose reveal nothing about another's keys.

        Returns:
            32 bytes each; the first is used for proofs, all are accepted.
        """
        self._refresh()
        keys = self._keys.get(purpose)
        if keys is None:
            with self._lock:
                label = b"baton key: " + purpose
                keys = self._keys[purpose] = tuple(hmac.digest(x.encode(), label, "sha256") for x in self._tokens)
        return keys

    def mac(self, purpose: bytes, data: bytes) -> bytes:
        """Return the HMAC-SHA256 of some data."""
        return hmac.digest(self.keys(purpose)[0], data, "sha256")

    def verifies(self, purpose: bytes, data: bytes, mac: bytes) -> bool:
        """Whether a MAC was made with one of the tokens; in constant time per token."""
        return any(hmac.compare_digest(hmac.digest(key, data, "sha256"), mac) for key in self.keys(purpose))

    def _refresh(self) -> None:
        """Read the file again if it changed; an unreadable one is logged and changes nothing."""
        if not self._path or time.monotonic() - self._looked < _LOOK_S:
            return
        with self._lock:
            self._looked = time.monotonic()
            stamp = file_stamp(self._path)
            if stamp == self._seen:
                return
            self._seen = stamp
            try:
                tokens = _read(self._path, pipes=False)  # on a loop, which must not wait for a writer
            except ConfigError as error:
                log.error("the token stays as it was: %s", error.message)
                audit("keys_changed", source=self._path, taken="no")
                return
            if tokens != self._tokens:
                self._tokens = tokens
                self._keys = {}
                self._generation += 1
                log.info("the token file was read again: %d tokens are accepted", len(tokens))
                audit("keys_changed", source=self._path, taken="yes", tokens=len(tokens))


def read_token(path: str) -> Token | None:
    """Read a token file; an empty path means no token.

    The file has a token in each line: the first is used for proofs, all are accepted, so that a token can be replaced
    while the services run. It is read again when it changes.

    Raises:
        ConfigError: The file is missing or empty, has too many tokens, one that could be guessed, or is open to others.
    """
    return Token(*_read(path), path=path) if path else None


def _read(path: str, *, pipes: bool = True) -> tuple[str, ...]:
    try:
        lines = read_secret_file(path, "the token file", "token_file", pipes=pipes).decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the token file {path} is no text", field="token_file") from error
    tokens = _checked([line.strip() for line in lines if line.strip()], path)
    for token in tokens:
        require_unguessable(token, f"a token in {path}", "token_file")
    return tokens


def _checked(tokens: Sequence[str], path: str) -> tuple[str, ...]:
    if not tokens:
        raise ConfigError(f"the token file {path} is empty", field="token_file")
    if len(tokens) > MAX_TOKENS:
        raise ConfigError(f"the token file {path} has more than {MAX_TOKENS} lines", field="token_file")
    return tuple(tokens)
