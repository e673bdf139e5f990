"""How long a step will take, learned from how long the last ones took.

    seconds = base + per_token * (prefill tokens)
            + per_attended * (pairs of a prefill token and a token it attends to)
            + per_decode_context * (tokens that the decodes read)

Decodes share the reading of the weights, which is the base; they add nothing per token.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from math import inf, sqrt

import numpy as np
import numpy.typing as npt

from engine.scheduling.batch import ScheduledSequence

# Of a Llama-3.1-8B in bf16 on an H200 (vLLM 0.26). Another device begins with these ratios, and its
# first measured step gives the scale.
FIRST_GUESS = (4.9e-3, 26.8e-6, 1.03e-9, 31e-9)
FIRST_ERROR = 0.25
GUESS_WEIGHT = 1e-4  # of a measured step; more would hold back a device that is quite different
PROFILE_WEIGHT = 8  # measured steps that one of the profile counts for
WINDOW = 32  # steps after which one counts for a third
ERROR_WINDOW = 32
LEAST_STEP_S = 1e-6
NUM_ERRORS = 3  # mean absolute errors to allow for; of normal ones 99 % are below 2.9 of them
LEAST_ERROR = 0.03  # however well the last steps were predicted, a host stumbles

Vector = npt.NDArray[np.float64]
IDENTITY: Vector = np.eye(len(FIRST_GUESS))
SUBSETS = [
    list(chosen)
    for num_chosen in range(1, len(FIRST_GUESS) + 1)
    for chosen in combinations(range(len(FIRST_GUESS)), num_chosen)
]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a step depends on."""

    num_prefill_tokens: int
    num_attended: int
    num_decode_context: int


def num_attended(num_tokens: int, start: int) -> int:
    """Pairs of the causal attention of a chunk: each token attends to all before it and itself."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def shape_of(scheduled: Iterable[ScheduledSequence]) -> StepShape:
    """One token reads its context as a decode does, whatever it is."""
    tokens = attended = context = 0
    for entry in scheduled:
        if entry.num_new_tokens == 1:
            context += entry.end
        else:
            tokens += entry.num_new_tokens
            attended += num_attended(entry.num_new_tokens, entry.start)
    return StepShape(tokens, attended, context)


class CostModel:
    """The coefficients above, >= 0, by recursive least squares of the relative error. Deterministic
    given its observations. `profile` holds steps measured at start, each typical of its shape.

    Older steps count exponentially less; coefficients that new steps say nothing about, as decodes
    do of a chunk's, stay. A step can be slow by accident but not fast, so a slow one is believed
    up to half more than predicted, and further only where predictions have been wrong for a while.
    """

    def __init__(self, profile: Iterable[tuple[StepShape, float]] = ()) -> None:
        self._unit: Vector = np.array(FIRST_GUESS)  # the next two count in multiples of it
        self._estimate: Vector = np.ones(len(FIRST_GUESS))  # may be negative, unlike what is used
        self._information: Vector = GUESS_WEIGHT * IDENTITY
        self._base, self._per_token, self._per_attended, self._per_decode_context = FIRST_GUESS
        self._has_observed = False
        self._error = FIRST_ERROR
        self._start_from(list(profile))

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Seconds: base, per token, per attended pair, per token of decode context."""
        return self._base, self._per_token, self._per_attended, self._per_decode_context

    @property
    def error(self) -> float:
        """Mean relative error of the recent predictions for steps with a prefill, below 1."""
        return self._error

    def predict(self, shape: StepShape) -> float:
        """Seconds of a step."""
        return (
            self._base
            + self._per_token * shape.num_prefill_tokens
            + self._per_attended * shape.num_attended
            + self._per_decode_context * shape.num_decode_context
        )

    def target_for(self, max_seconds: float) -> float:
        """What to plan a step for, if 99 of 100 are to take `max_seconds` at most: the better the
        predictions of late, the nearer to it."""
        return max_seconds / (1 + NUM_ERRORS * max(self._error, LEAST_ERROR))

    def predict_chunk(self, num_tokens: int, start: int) -> float:
        """Seconds that a chunk from position `start` on adds to its step. Chunks add up: those of
        a prompt cost the same however it is cut."""
        return self._per_token * num_tokens + self._per_attended * num_attended(num_tokens, start)

    def largest_chunk(self, seconds: float, start: int, max_tokens: int) -> int:
        """Tokens from position `start` on, `max_tokens` at most, that add `seconds` at most."""
        if seconds <= 0:
            return 0
        if seconds == inf:
            return max_tokens
        linear = self._per_token + self._per_attended * (start + 0.5)
        root = sqrt(linear * linear + 2 * self._per_attended * seconds)
        if (linear + root) * max_tokens <= 2 * seconds:
            return max_tokens
        return min(max_tokens, int(2 * seconds / (linear + root)))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took `seconds`; a clock that stood still is not believed."""
        if not LEAST_STEP_S <= seconds < inf:
            return
        self._scale_at_first(shape, seconds)
        predicted = self.predict(shape)
        max_error = (1 + 2 * self._error) / 3
        if shape.num_attended:
            error = min(abs(1 - predicted / seconds), max_error)
            self._error += (error - self._error) / ERROR_WINDOW
        self._learn(shape, min(seconds, max(predicted, LEAST_STEP_S) / (1 - max_error)))

    def _start_from(self, profile: list[tuple[StepShape, float]]) -> None:
        for shape, seconds in profile:
            self._scale_at_first(shape, seconds)
            for _ in range(PROFILE_WEIGHT):
                self._learn(shape, seconds)
        errors = [
            abs(1 - self.predict(shape) / seconds)
            for shape, seconds in profile
            if shape.num_attended
        ]
        if errors:
            self._error = min(FIRST_ERROR, sum(errors) / len(errors))

    def _scale_at_first(self, shape: StepShape, seconds: float) -> None:
        if not self._has_observed:
            self._unit *= seconds / self.predict(shape)
            self._use(self._estimate)
            self._has_observed = True

    def _learn(self, shape: StepShape, seconds: float) -> None:
        scale = max(min(seconds, self.predict(shape)), LEAST_STEP_S)
        sizes = (1, shape.num_prefill_tokens, shape.num_attended, shape.num_decode_context)
        row: Vector = np.array(sizes) * self._unit / scale
        # Never less than the guess's, and invertible however far apart the sizes of steps are.
        least = GUESS_WEIGHT / WINDOW + 1e-9 * (row @ row)
        self._information *= 1 - 1 / WINDOW
        self._information += np.outer(row, row) + least * IDENTITY
        gain = np.linalg.solve(self._information, row)
        self._estimate += gain * (seconds / scale - row @ self._estimate)
        self._use(_nearest_nonnegative(self._estimate, self._information))

    def _use(self, estimate: Vector) -> None:
        self._base, self._per_token, self._per_attended, self._per_decode_context = (
            estimate * self._unit
        ).tolist()


def _nearest_nonnegative(estimate: Vector, information: Vector) -> Vector:
    """The least squares under the constraint. So few unknowns that every set of them that may be
    positive can be tried; nearly always the first, those that are positive without it, is right."""
    if (estimate >= 0).all():
        return estimate
    target: Vector = information @ estimate
    best, least_loss = np.zeros_like(estimate), 0.0
    for chosen in (np.flatnonzero(estimate > 0).tolist(), *SUBSETS):
        solution = np.zeros_like(estimate)
        solution[chosen] = np.linalg.solve(information[np.ix_(chosen, chosen)], target[chosen])
        loss = -float(solution @ target)  # at its minimum over `chosen`
        if loss < least_loss and (solution >= 0).all():
            best, least_loss = solution, loss
            if (information @ solution >= target - 1e-9 * abs(target)).all():
                break  # no other coefficient would lower it
    return best
