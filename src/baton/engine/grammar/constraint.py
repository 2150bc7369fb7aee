"""One sequence under a grammar, and the masks of a step, computed beside its forward pass or before it.

The mask wins over everything else that chooses tokens. What contradicts it means:

* ``min_tokens``, ``ignore_eos``: tokens that would end the sequence are forbidden where others are allowed. Where the
  grammar allows nothing else, the sequence ends.
* ``logit_bias``, penalties: they weigh allowed tokens against each other, however low they set all of them.
* An answer that is complete ends at once, without a token that ends it.
* Where the grammar starts after certain tokens (``start_token_ids``), nothing ends the sequence before them.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.engine.grammar.base import GRAMMAR_BACKENDS, GrammarBackend, GrammarMatcher
from baton.errors import ConfigError, InvalidRequestError
from baton.types import Grammar, TokenLogprob
from baton_kernels.cpu.library import ThreadTeam
from baton_kernels.token_mask import TokenMask, mask_words, pack_mask

log = logging.getLogger(__name__)

LONG_RUN = 64
"""A run of more forced tokens is taken as a whole. A shorter one is asked for again after each of its tokens, as
often as masks would be: what follows a token depends on the tokens before it, not on when it was asked for."""
USUAL_S = 0.0002
"""What a mask usually takes at most, four times what most do."""
FOLLOW_S = 3e-8
"""What following one token of the vocabulary through a grammar may take, two or three times what it does. In a string
of bounded length that is nearly full, most tokens are followed until they are too long."""
SLOW_S = 0.002
"""What the masks of a step may take beside that before it is measured whose they are."""
WATCHED_STEPS = 16
FIRST_WORDS = 64
"""Of a mask: the first 2,048 tokens."""
MAX_EXTRA_S = 0.5
"""What the masks of one request may take beyond following the whole vocabulary. All sequences of a step wait for each
other's."""


@dataclass(slots=True)
class RequestCost:
    """What the masks of a request's sequences took, as far as it was measured, beyond what they may."""

    seconds: float = 0.0


class Constraint:
    """Where a sequence is in its grammar, which follows from the grammar and its output tokens alone.

    Args:
        origin: The grammar's beginning; never changed.
        grammar: The grammar.
        eos_token_ids: Tokens that end a sequence.

    Attributes:
        cost: Shared by all forks.
        started: Whether the grammar applies yet.
        error: Why no token can be chosen any more; empty: one can.
        refusals: Tokens in a row that were chosen without a mask and refused.
    """

    def __init__(self, origin: GrammarMatcher, grammar: Grammar, eos_token_ids: frozenset[int]) -> None:
        self._origin = origin
        self.grammar = grammar
        self.eos_token_ids = eos_token_ids
        self.cost = RequestCost()
        self.refusals = 0
        self.restart(())

    def restart(self, output: Sequence[int]) -> None:
        """Start again from the beginning with output tokens."""
        self.matcher = self._origin.fork()
        self.started = not self.grammar.start_token_ids
        self.error = ""
        self._ahead: int | None = None
        """The next token, if the matcher has it already."""
        self._forced: list[int] | None = None
        """What is forced, behind that token; ``None``: it is not known."""
        self._seen: tuple[int, ...] = ()
        for token in output:
            self.append(token)

    def fork(self) -> Constraint:
        """Return another one in the same state."""
        copy = Constraint.__new__(Constraint)
        copy.__dict__.update(self.__dict__)
        copy.matcher = self.matcher.fork()
        return copy

    def append(self, token: int) -> None:
        """Take note of the next output token."""
        ahead = self._ahead
        self._ahead = None
        if ahead == token:
            return
        if ahead is not None:
            self.matcher.roll_back(1)
        self._forced = None
        if not self.started:
            start = self.grammar.start_token_ids
            self._seen = (*self._seen, token)[-len(start) :]
            self.started = self._seen == start
        elif token not in self.eos_token_ids and not self.matcher.consume((token,)) and not self.error:
            self.error = f"token {token} does not follow the grammar ({self.grammar}): {self.matcher.error}"

    def allows(self, token: int) -> bool:
        """Whether a token may come next. Of what is forced, the mask has the next token alone."""
        if not self.started:
            return token not in self.eos_token_ids
        return self.forced()[:1] in ([], [token]) and self.matcher.allows(token)

    def try_consume(self, token: int) -> bool:
        """Whether a token may come next; if so, the caller is going to append it.

        Checking, consuming and looking for forced tokens in one go is cheaper: the matcher's memory has left the
        processor's caches since the token before.
        """
        if not self.started or token in self.eos_token_ids:
            return self.allows(token)
        forced = self._forced if self._forced is not None else self.forced()
        if (forced and forced[0] != token) or not _try_consume(self.matcher, token):
            return False
        self._ahead = token
        self._forced = None
        self.forced()
        return True

    def forced(self) -> list[int]:
        """Return tokens that must come next, as masks would choose them one by one; none where there is a choice."""
        if not self.started or self.error:
            return []
        if self._forced is None:
            token_ids = self.matcher.forced_tokens()
            self._forced = token_ids if len(token_ids) > LONG_RUN else token_ids[:1]
        return self._forced

    @property
    def complete(self) -> bool:
        """Whether only the end can follow."""
        return self.started and self.matcher.complete


def _try_consume(matcher: GrammarMatcher, token: int) -> bool:
    # Matchers of other packages may still have the method under its earlier name.
    method = getattr(matcher, "try_consume", None) or matcher.take  # type: ignore[attr-defined]
    return bool(method(token))


def check_output(constraint: Constraint) -> Constraint:
    """Return a constraint unless the output that it was started with is not what its grammar allows.

    Raises:
        InvalidRequestError: It is not; names ``output_token_ids``.
    """
    if constraint.error:
        raise InvalidRequestError(f"output_token_ids: {constraint.error}", field="output_token_ids")
    return constraint


class BannedTokens:
    """Tokens that are forbidden where others are allowed.

    Args:
        token_ids: The tokens.

    Attributes:
        token_ids: The same.
    """

    __slots__ = ("_words", "token_ids")

    def __init__(self, token_ids: Iterable[int]) -> None:
        self.token_ids = frozenset(token_ids)
        words = dict[int, int]()
        for token in self.token_ids:
            words[token >> 5] = words.get(token >> 5, 0) | 1 << (token & 31)
        self._words = list(words.items())
        """Words of masks, and which of their bits are these tokens'. Mostly it is one, and one row's mask: NumPy would
        take several times as long."""

    def forbid(self, mask: TokenMask) -> list[int]:
        """Remove the tokens from a mask, in place; return what :meth:`restore` needs."""
        before = list[int]()
        for at, bits in self._words:
            word = int(mask[at])
            before.append(word)
            mask[at] = word & ~bits
        return before

    def restore(self, mask: TokenMask, before: Sequence[int]) -> bool:
        """Undo :meth:`forbid` for a mask that has no other tokens; return whether it had these."""
        for (at, _), word in zip(self._words, before, strict=True):
            mask[at] = word
        return any(before)


class MaskRow(NamedTuple):
    """A row whose mask is wanted.

    Attributes:
        constraint: Constraint of the row's sequence.
        banned: Tokens that are forbidden where others are allowed; ``None``: none.
    """

    constraint: Constraint
    banned: BannedTokens | None = None

    def try_consume(self, token_ids: Sequence[int]) -> bool:
        """Whether the mask allows all of some tokens; if so, the caller is going to append the last one.

        ``False`` also if there are none, or if the answer depends on other tokens of the mask.
        """
        constraint, banned = self
        taken = bool(token_ids)
        if taken and banned is not None and constraint.started:
            taken = banned.token_ids.isdisjoint(token_ids)
        if taken and len(token_ids) > 1:
            taken = all(constraint.allows(token) for token in token_ids[:-1])
        taken = taken and constraint.try_consume(token_ids[-1])
        constraint.refusals = 0 if taken else constraint.refusals + 1
        return taken


class StepMasks:
    """Computes the masks of one step after the other, in a thread beside the forward pass.

    Where the forward pass has all processors, that thread would take one from it, and each operation waits for the
    slowest of its threads: masks cost their time on one processor then, while the others wait. So does handing a cheap
    mask over, which takes longer than the mask. There the engine's thread computes masks, together with the pass's
    other threads: before the pass where a token's choice needs them, else after it, of those rows alone whose token,
    chosen from all, is refused.

    Args:
        backend: Backend that compiled the constraints' matchers.
        vocab_size: Columns of the logits.
        team: The threads of the forward pass, where it leaves no processor free.

    Attributes:
        mask_seconds: Time in masks since start; without a team, most of it lies beside forward passes.
        mask_wait_seconds: Time in which steps waited for their masks, or for what stands in for them.
        masks: Masks computed since start.
        tried_tokens: Tokens since start that were chosen without a mask.
        refused_tokens: Those of them that the grammar did not take: masks were computed for these.
        forced_tokens: Tokens that were forced, and not sampled, since start.
        jump_forward: Whether forced tokens are appended at once; else their masks choose them, one per step.
        come_late: Whether masks that can come after their tokens' first choice are to, as none is computed beside the
            forward pass. May be changed between steps, and changes no token.
    """

    def __init__(self, backend: GrammarBackend, vocab_size: int, team: ThreadTeam | None = None) -> None:
        self._backend = backend
        self._team = team
        self._words = mask_words(vocab_size)
        self._memory = np.empty((0, self._words), np.uint32)
        self._vocab_size = vocab_size
        self._may_take = FOLLOW_S * vocab_size
        self._unended: dict[frozenset[int], TokenMask] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self.mask_seconds = self.mask_wait_seconds = 0.0
        self.masks = self.forced_tokens = self.tried_tokens = self.refused_tokens = 0
        self._watched = 0
        """Steps that are still to be measured row by row."""
        self.jump_forward = True
        self.come_late = team is not None

    def forced(self, constraint: Constraint) -> Iterator[TokenLogprob]:
        """Yield the tokens that must follow, with the log probability of what has no alternative.

        Args:
            constraint: Constraint of the sequence; the caller appends each token before it asks for the next one.
        """
        while self.jump_forward and (forced := self._forced(constraint)):
            for token in forced:
                self.forced_tokens += 1
                yield TokenLogprob(token, 0.0, 1, ((token, 0.0),))

    def begin(self, rows: Sequence[MaskRow]) -> Future[list[TokenMask]]:
        """Begin the masks of rows, parallel to them; they are valid until the next step's.

        A constraint whose grammar allows nothing has an ``error`` afterwards.
        """
        if len(rows) > len(self._memory):
            self._memory = np.empty((2 * len(rows), self._words), np.uint32)
        memory = self._memory[: len(rows)]
        if self._team is None:
            return self._thread.submit(self._compute, rows, memory)
        started = time.perf_counter()
        done = Future[list[TokenMask]]()
        try:
            done.set_result(self._compute(rows, memory))
        except Exception as error:
            done.set_exception(error)
        self.mask_wait_seconds += time.perf_counter() - started
        return done

    def end(self, masks: Future[list[TokenMask]]) -> list[TokenMask]:
        """Wait for masks and return them."""
        started = time.perf_counter()
        computed = masks.result()
        self.mask_wait_seconds += time.perf_counter() - started
        return computed

    def refused(self, rows: Sequence[MaskRow], token_ids: Sequence[Sequence[int]]) -> list[int]:
        """Return which rows, by index, are not to have the token that was chosen for them without a mask.

        Args:
            rows: Rows without a mask in this step.
            token_ids: What :meth:`MaskRow.try_consume` is to take, parallel to them.
        """
        started = time.perf_counter()
        refused = self._refused(rows, token_ids)
        taken = time.perf_counter() - started
        if taken > USUAL_S * len(rows) + SLOW_S:
            self._watched = WATCHED_STEPS
        self.tried_tokens += len(rows)
        self.refused_tokens += len(refused)
        self.mask_wait_seconds += taken
        return refused

    def late(self, rows: Sequence[MaskRow]) -> list[TokenMask]:
        """Return the masks of rows whose token was refused."""
        started = time.perf_counter()
        computed = self._compute(rows, np.empty((len(rows), self._words), np.uint32))
        self.mask_wait_seconds += time.perf_counter() - started
        return computed

    def _refused(self, rows: Sequence[MaskRow], token_ids: Sequence[Sequence[int]]) -> list[int]:
        tokens = enumerate(zip(rows, token_ids, strict=True))
        if not self._watched:
            return [i for i, (row, wanted) in tokens if not row.try_consume(wanted)]
        self._watched -= 1
        refused = list[int]()
        begun = time.thread_time()
        for i, (row, wanted) in tokens:
            if not row.try_consume(wanted):
                refused.append(i)
            ended = time.thread_time()
            _charge(row.constraint, ended - begun)
            begun = ended
        return refused

    def _compute(self, rows: Sequence[MaskRow], memory: npt.NDArray[np.uint32]) -> list[TokenMask]:
        started = time.perf_counter()
        guided = [row for row in rows if row.constraint.started]
        masks = memory[: len(guided)]
        if guided:
            self._fill([row.constraint for row in guided], masks)
        filled = zip(masks, _forbid(guided, masks), strict=True)
        results = list[TokenMask]()
        for row in rows:
            constraint = row.constraint
            if not constraint.started:
                results.append(self._all_tokens_but(constraint.eos_token_ids))
                continue
            mask, some = next(filled)
            constraint.error = constraint.error or constraint.matcher.error
            if not constraint.error and not some:
                constraint.error = "no token may follow"
            results.append(mask)
        self.mask_seconds += time.perf_counter() - started
        self.masks += len(guided)
        return results

    def _all_tokens_but(self, token_ids: frozenset[int]) -> TokenMask:
        """Return the mask of all tokens but some, which are few sets of tokens in all."""
        mask = self._unended.get(token_ids)
        if mask is None:
            mask = self._unended[token_ids] = pack_mask(np.ones(self._vocab_size, np.bool_))
            BannedTokens(token_ids).forbid(mask)
        return mask

    def _forced(self, constraint: Constraint) -> list[int]:
        begun = time.thread_time()
        forced = constraint.forced()
        _charge(constraint, time.thread_time() - begun)
        return [] if constraint.error else forced

    def _fill(self, guided: Sequence[Constraint], masks: npt.NDArray[np.uint32]) -> None:
        """Compute masks, and take note of what they cost: one by one for a while where they cost much."""
        begun = time.perf_counter()
        if self._watched or self._team is not None:
            self._fill_one_by_one(guided, masks)
        else:
            self._backend.fill_masks([one.matcher for one in guided], masks)
        self._watched = max(0, self._watched - 1)
        extra = time.perf_counter() - begun - USUAL_S * len(guided)
        if extra > 0 and not self._watched:
            for one in guided:
                one.matcher.family.seconds += extra / len(guided)
        if extra > SLOW_S:
            self._watched = WATCHED_STEPS

    def _fill_one_by_one(self, guided: Sequence[Constraint], masks: npt.NDArray[np.uint32]) -> None:
        """Compute masks in this thread, and with it in the team's: each takes what no other has taken."""
        left = iter(list(zip(guided, masks, strict=True)))
        if self._team is not None and self._team.threads > 1 and len(guided) > 1:
            self._team.run(lambda: self._drain(left))
        else:
            self._drain(left)

    def _drain(self, left: Iterator[tuple[Constraint, TokenMask]]) -> None:
        # Masks are computed without the interpreter's lock, and with few instructions between them threads seldom meet.
        fill = self._backend.fill_mask
        clock = time.thread_time
        if not self._watched:
            for one, mask in left:
                fill(one.matcher, mask)
            return
        begun = clock()
        for one, mask in left:
            fill(one.matcher, mask)
            ended = clock()
            _charge(one, ended - begun, self._may_take)
            begun = ended


def _forbid(rows: Sequence[MaskRow], masks: npt.NDArray[np.uint32]) -> list[bool]:
    """Take banned tokens out of masks that have others; return which masks have any token."""
    before = [None if row.banned is None else row.banned.forbid(mask) for row, mask in zip(rows, masks, strict=True)]
    some = _any_token(masks)
    for at, row in enumerate(rows):
        words = before[at]
        if not some[at] and row.banned is not None and words is not None:
            some[at] = row.banned.restore(masks[at], words)
    return some


def _any_token(masks: npt.NDArray[np.uint32]) -> list[bool]:
    """Return which masks have any token. Nearly all do among the first, which spell whatever is not one token."""
    some: list[int] = np.bitwise_or.reduce(masks[:, :FIRST_WORDS], axis=1).tolist()
    return [bool(has_token or mask.any()) for has_token, mask in zip(some, masks, strict=True)]


def _charge(one: Constraint, seconds: float, may_take: float = 0.0) -> None:
    """Count what a mask, or the search for forced tokens, took.

    Args:
        one: Constraint that is charged.
        seconds: CPU time of one thread.
        may_take: What of it beyond what is usual is not held against the request.
    """
    extra = seconds - USUAL_S
    if extra > 0:
        one.matcher.family.seconds += extra
    if extra > may_take:
        one.cost.seconds += extra - may_take
        if one.cost.seconds > MAX_EXTRA_S:
            one.error = one.error or "its masks take too long: it is ambiguous, or has too many states"


MAX_GRAMMARS = 128
MAX_TEXT_BYTES = 8 * 1024 * 1024
"""Most bytes of cached grammars' texts; compiled grammars take a multiple."""
MAX_FAMILY_S = 0.25
"""Time in masks beyond what is usual, after which a grammar is kept no more: its lexer has some 10,000 states then, in
about 15 MiB. The next request compiles it again."""


class GrammarCompiler:
    """Compiles grammars into constraints and caches them. Thread-safe.

    A grammar is cached for its owner alone, so that the latency of a request does not reveal other tenants' grammars,
    and no tenant can fill the lexer of another's grammar.

    Args:
        backend: Compiles the grammars.
        eos_token_ids: Tokens that end a sequence.
        max_grammars: Most grammars in the cache.
        max_text_bytes: Most bytes of their texts.

    Attributes:
        cache_hits: Grammars found in the cache.
        compiled: Grammars compiled.
        refused: Grammars that could not be compiled.
        compile_seconds: Time in compilation.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        eos_token_ids: frozenset[int],
        *,
        max_grammars: int = MAX_GRAMMARS,
        max_text_bytes: int = MAX_TEXT_BYTES,
    ) -> None:
        self.backend = backend
        self._eos = eos_token_ids
        self._max = max_grammars
        self._max_bytes = max_text_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], tuple[GrammarMatcher, int]] = OrderedDict()
        self.cache_hits = self.compiled = self.refused = 0
        self.compile_seconds = 0.0

    def find(self, grammar: Grammar, owner: str = "") -> Constraint | None:
        """Return the constraint of a grammar that is compiled, at its beginning; ``None``: it is not.

        Args:
            grammar: The grammar.
            owner: Cache salt of the request; grammars are cached per owner.
        """
        key = owner, grammar.digest
        with self._lock:
            entry = self._kept.get(key)
            if entry is None:
                return None
            if _is_spent(entry[0]):
                self._drop(key)
                return None
            self._kept.move_to_end(key)
            self.cache_hits += 1
        return Constraint(entry[0], grammar, self._eos)

    def constraint(self, grammar: Grammar, output: Sequence[int] = (), owner: str = "") -> Constraint:
        """Return the constraint of a grammar after output tokens; compiles it, in a millisecond as a rule.

        Args:
            grammar: The grammar.
            output: The tokens.
            owner: See :meth:`find`.

        Raises:
            InvalidRequestError: The grammar cannot be compiled or costs too much, or the tokens do not follow it.
        """
        constraint = self.find(grammar, owner)
        if constraint is None:
            constraint = Constraint(self._compile(grammar, owner), grammar, self._eos)
        if output:
            constraint.restart(output)
        return check_output(constraint)

    def _compile(self, grammar: Grammar, owner: str) -> GrammarMatcher:
        started = time.perf_counter()
        try:
            matcher = self.backend.compile(grammar)
        except InvalidRequestError:
            self.refused += 1
            raise
        key = (owner, grammar.digest)
        size = sys.getsizeof(grammar.text)
        with self._lock:
            self.compiled += 1
            self.compile_seconds += time.perf_counter() - started
            for old in [old for old, (kept, _) in self._kept.items() if _is_spent(kept)]:
                self._drop(old)
            if key not in self._kept:
                self._kept[key] = matcher, size
                self._bytes += size
            while self._kept and (len(self._kept) > self._max or self._bytes > self._max_bytes):
                self._drop(next(iter(self._kept)))
        return matcher

    def _drop(self, key: tuple[str, str]) -> None:
        _, size = self._kept.pop(key)
        self._bytes -= size

    def __len__(self) -> int:
        return len(self._kept)


def _is_spent(matcher: GrammarMatcher) -> bool:
    return matcher.family.spent or matcher.family.seconds > MAX_FAMILY_S


def load_compiler(name: str, model: Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> GrammarCompiler | None:
    """Return a compiler for a model; ``None``: it has no support for grammars, by configuration or for its tokenizer.

    Args:
        name: ``none``, ``auto``, or that of a backend.
        model: Directory with the tokenizer's files.
        vocab_size: Columns of the logits.
        eos_token_ids: Tokens that end a sequence.

    Raises:
        ConfigError: A backend was named, and there is none of that name, or it cannot work with this tokenizer.
    """
    if name == "none":
        return None
    try:
        make = GRAMMAR_BACKENDS.load("llguidance" if name == "auto" else name, other_names=["auto"])
        backend: GrammarBackend = make(model, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    except ConfigError as error:
        if name != "auto":
            raise
        log.warning("no support for grammars: %s", error.message)
        return None
    return GrammarCompiler(backend, eos_token_ids)
