"""How long a step may take: so many prompt tokens are computed beside decodes as the time between tokens allows.

A step's time is learnt from the steps that were run, as a linear function of what they computed::

    seconds = fixed + rows * a + decode_context * b + prompt_tokens * c + prompt_attention * d

Steps are kept as averages, one per kind of step (by the magnitudes of its sizes), to which the coefficients, none
below 0, are fitted by least squares of relative errors. So many decodes in a row cannot push out what is known of
prompts, and short steps count as much as long ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.config import EngineConfig

DEFAULT_SECONDS = 0.05
"""Default time limit of steps on a decode instance, unless their decodes alone take longer."""
SLO_SHARE = 0.8
"""Share of the time between tokens that a step may use; the rest covers estimation errors and delivery."""
LEAST_SHARE = 0.25
"""Prompts get at least this share of the decodes' time, so that decodes that fill the budget do not starve them."""
BACKGROUND_WAIT = 0.1
"""Time limit of steps of background sequences alone, as a share of what another prompt takes: one that arrives waits
for the end of the step, for half of it in the mean."""
BACKGROUND_SECONDS = 0.01
"""The same limit before anything is known of other prompts."""
LEAST_BACKGROUND_SECONDS, MOST_BACKGROUND_SECONDS = 0.002, 0.05
"""Bounds of that limit: shorter steps would be overhead for the most part, longer ones gain nothing."""
BACKGROUND_SHARE = 0.1
"""Share of the time of other sequences' decodes that background sequences may add to a step."""
FIRST_TOKENS = 32
"""Prompt tokens of the first bounded step, before anything is known; each may have twice as many as the largest yet."""

_MOST_KINDS = 64
"""Kinds of steps that are kept; the one that was not seen for longest goes first."""
_NEWS = 0.2
"""Weight of a step in its kind's average."""
_FADING = 0.98
"""A kind counts so much less with each step that was of another kind ..."""
_LEAST_WEIGHT = 0.01
"""... but not less than this: it may be all that is known of large steps."""
_OUTLIER = 3.0
"""A step that took so many times the estimate counts as that: the process was stopped, or the machine is busy."""
_PROMPT_FADING = 0.95
"""What a prompt weighs in the mean time of prompts after the next one."""
_RIDGE = 1e-4
"""Ridge term on the normalised equations; splits the time between features that always change together."""


@dataclass(slots=True)
class StepWork:
    """What a step computes, as far as its time depends on it.

    Attributes:
        rows: Rows of logits.
        decode_context: Context of the sequences that decode, in tokens, summed.
        prompt_tokens: Tokens of prompts (and of output that is computed again).
        prompt_attention: Pairs of these and the tokens that they attend to.
    """

    rows: int = 0
    decode_context: int = 0
    prompt_tokens: int = 0
    prompt_attention: float = 0.0

    def add_decode(self, context: int) -> None:
        """Count a sequence that computes one token, its last one of ``context``."""
        self.rows += 1
        self.decode_context += context

    def add_prompt(self, start: int, count: int) -> None:
        """Count ``count`` tokens of a prompt from position ``start`` on."""
        self.prompt_tokens += count
        self.prompt_attention += count * (start + 0.5 * count)


@dataclass(slots=True)
class _StepKind:
    """The average of like steps: features [5], seconds, and when the last one was."""

    features: npt.NDArray[np.float64]
    seconds: float
    last: int


class StepCost:
    """The time of steps, learnt while they run.

    Attributes:
        most_prompt_tokens: Largest number of prompt tokens in an observed step.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, ...], _StepKind] = {}
        self._weights = np.zeros(5)
        self._steps = 0
        self._current = True
        self.most_prompt_tokens = 0

    def predict(self, work: StepWork) -> float:
        """Return the seconds that a step is going to take; 0 before anything was observed."""
        self._refit()
        return float(self._weights @ _features(work))

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that was run."""
        features = _features(work)
        if seconds > _OUTLIER * float(self._weights @ features):
            expected = self.predict(work)
            if expected > 0.0 and work.prompt_tokens <= self.most_prompt_tokens:
                seconds = min(seconds, _OUTLIER * expected)
        self._steps += 1
        self.most_prompt_tokens = max(self.most_prompt_tokens, work.prompt_tokens)
        start = int(work.prompt_attention / work.prompt_tokens) if work.prompt_tokens else 0
        sizes = (work.rows, work.decode_context >> 8, work.prompt_tokens, start >> 8)
        name = tuple(size.bit_length() for size in sizes)
        kind = self._kinds.pop(name, None) or _StepKind(features, seconds, 0)
        kind.features = kind.features + _NEWS * (features - kind.features)
        kind.seconds += _NEWS * (seconds - kind.seconds)
        kind.last = self._steps
        self._kinds[name] = kind  # at the end: that is the order of their last steps
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        self._current = False

    def _refit(self) -> None:
        """Fit the coefficients again if steps were observed; steps with decodes alone do not need them."""
        if self._current:
            return
        self._current = True
        kinds = self._kinds.values()
        seconds = np.array([max(kind.seconds, 1e-9) for kind in kinds])
        ages = np.array([self._steps - kind.last for kind in kinds])
        share = np.sqrt(np.maximum(_FADING**ages, _LEAST_WEIGHT))
        rows = np.array([kind.features for kind in kinds]) * (share / seconds)[:, None]
        norms = np.sqrt((rows * rows).sum(axis=0))
        used = norms > 0.0
        weights = np.zeros(len(norms))
        while used.any():
            columns = rows[:, used] / norms[used]
            matrix = columns.T @ columns + _RIDGE * np.eye(columns.shape[1])
            coefficients = np.linalg.solve(matrix, columns.T @ share) / norms[used]
            if (coefficients >= 0.0).all():
                weights[used] = coefficients
                break
            # Without what would be negative, by the largest first: the rest takes its part over.
            used[np.flatnonzero(used)[(coefficients * norms[used]).argmin()]] = False
        self._weights = weights

    def decode_seconds(self, context: int) -> float:
        """Return the seconds that one more decoding sequence takes in a step; ``context``: its length in tokens."""
        self._refit()
        return float(self._weights[1] + self._weights[2] * context)

    def affordable(self, seconds: float, start: int) -> int:
        """Return how many tokens of a prompt from position ``start`` on take at most ``seconds`` more."""
        self._refit()
        per_token, per_pair = self._weights[3:].tolist()
        linear = per_token + per_pair * start
        if seconds <= 0.0:
            return 0
        if seconds == math.inf or (linear <= 0.0 and per_pair <= 0.0):
            return 1 << 30
        # The positive root of per_pair / 2 * n^2 + linear * n = seconds.
        return int(2.0 * seconds / (linear + math.sqrt(linear * linear + 2.0 * per_pair * seconds)))


def _features(work: StepWork) -> npt.NDArray[np.float64]:
    return np.array((1.0, work.rows, work.decode_context, work.prompt_tokens, work.prompt_attention))


@dataclass(slots=True)
class StepBudget:
    """A limit on the time of steps in which clients wait for the next token.

    Attributes:
        seconds: The bound; ``None``: :data:`DEFAULT_SECONDS`, or twice what a step's decodes take alone.
        cost: Model of the time that steps take.
        num_bounded: Steps since start whose prompt tokens were cut by the limit.
    """

    seconds: float | None
    cost: StepCost = field(default_factory=StepCost)
    num_bounded: int = 0
    _prompts: float = 0.0
    _prompt_seconds: float = 0.0

    def observe_prompts(self, ended: int, seconds: float) -> None:
        """Learn how long prompts take.

        Args:
            ended: Prompts that a step computed to their end.
            seconds: Time of the step, in which parts of prompts were computed.
        """
        self._prompts += ended
        self._prompt_seconds += seconds
        if ended:
            self._prompts *= _PROMPT_FADING**ended
            self._prompt_seconds *= _PROMPT_FADING**ended

    def prefill_room(self, work: StepWork, least: int) -> PrefillRoom:
        """Return what prompts may take in a step whose decodes are known.

        Args:
            work: The decodes.
            least: Prompt tokens that are computed whatever they take, so that prompts always go on.
        """
        if not work.rows:
            return PrefillRoom(self, work, math.inf, 1 << 30, least)  # no client waits for a token
        alone = self.cost.predict(work)
        limit = max(DEFAULT_SECONDS, 2.0 * alone) if self.seconds is None else self.seconds
        most = max(FIRST_TOKENS, 2 * self.cost.most_prompt_tokens)
        return PrefillRoom(self, work, max(limit - alone, LEAST_SHARE * alone), most, least)

    def background_seconds(self, work: StepWork) -> float:
        """Return the time that background sequences may take in a step; ``work``: decodes of all others."""
        if work.rows:
            return BACKGROUND_SHARE * self.cost.predict(work)
        if not self._prompts:
            return BACKGROUND_SECONDS
        seconds = BACKGROUND_WAIT * self._prompt_seconds / self._prompts
        return min(MOST_BACKGROUND_SECONDS, max(LEAST_BACKGROUND_SECONDS, seconds))

    def background_room(self, work: StepWork, seconds: float, least: int) -> PrefillRoom:
        """Return what background sequences' prompts may take in a step.

        Args:
            work: All decodes of the step.
            seconds: Time that is left for background sequences.
            least: Prompt tokens that are computed whatever they take.
        """
        most = max(FIRST_TOKENS, 2 * self.cost.most_prompt_tokens)
        return PrefillRoom(self, work, seconds, most, least)


class PrefillRoom:
    """The time of one step that is left for prompts.

    Attributes:
        work: Work planned for the step so far.
    """

    def __init__(self, budget: StepBudget, work: StepWork, seconds: float, tokens: int, least: int) -> None:
        self._budget = budget
        self._seconds = seconds
        self._tokens = tokens
        self._least = least
        self._bounded = False
        self.work = work

    @property
    def full(self) -> bool:
        """Whether no further prompt token fits."""
        return self._least == 0 and (self._tokens <= 0 or self._budget.cost.affordable(self._seconds, 0) == 0)

    def fit(self, count: int, start: int) -> int:
        """Return how many of ``count`` tokens of a prompt from position ``start`` on can be computed."""
        affordable = min(self._tokens, self._budget.cost.affordable(self._seconds, start))
        fits = min(count, max(affordable, self._least))
        if fits < count and not self._bounded:
            self._bounded = True
            self._budget.num_bounded += 1
        return fits

    def reserve(self, count: int, start: int) -> None:
        """Reserve time for ``count`` tokens of a prompt from position ``start`` on."""
        cost = self._budget.cost
        before = cost.predict(self.work)
        self.work.add_prompt(start, count)
        self._seconds -= cost.predict(self.work) - before
        self._tokens -= count
        self._least = max(0, self._least - count)


def step_budget(config: EngineConfig, *, bounded: bool) -> StepBudget | None:
    """Return the bound on steps that a configuration asks for.

    Args:
        config: ``step_budget_ms`` and ``itl_slo_ms``; the smaller one counts.
        bounded: Whether there is one if neither is given: for instances with streams that wait for tokens.
    """
    given = []
    if config.step_budget_ms is not None:
        given.append(config.step_budget_ms / 1e3)
    if config.itl_slo_ms is not None:
        given.append(SLO_SHARE * config.itl_slo_ms / 1e3)
    if not given:
        return StepBudget(None) if bounded else None
    return StepBudget(min(given)) if min(given) > 0 else None
