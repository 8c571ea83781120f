"""What two recorded trainings differ in, and why, in words: plain Python and NumPy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
"""Relative differences that may be rounding, by dtype, the widest first."""
_FLOOR = 0.1  # Smaller values are compared as if they were of this size.
_OF_FLOAT32 = 1e-6  # A smaller difference in float64 looks like float32's rounding.
_OF_WEIGHTS = 1e-3  # Smaller differences between weights may be rounding.
_MAX_LINES = 5
_OWN_STEP = "docs/pitfalls.md#your-own-step-is-not-a-mean-over-rows"
_REASONS = {
    "rows": "The model needs a constant number of rows, and a tower has its part of a "
    "batch: take the number from the data (docs/pitfalls.md"
    "#a-step-assumes-the-whole-batch).",
    "finite": "Plain Keras has NaN or infinity, too: compare with a lower learning "
    "rate, or other data.",
    "random": "Random numbers (dropout, noise): each tower draws its own (docs/"
    "pitfalls.md#every-tower-has-the-same-dropout).",
    "statistics": "Batch statistics are of a tower's rows in {}: make the layer with "
    "synchronized=True (docs/pitfalls.md"
    "#batch-normalisation-is-updated-once-per-tower).",
    "weights": "The loss is a mean over something other than rows (tokens, unmasked "
    "positions): pass weights= to TowerModel "
    "(docs/howto/keras.md#train-a-model-on-several-devices).",
    "sum": "The loss is a sum over rows, or one divided by a constant: make it a mean, "
    f'or pass loss_reduction="sum" to TowerModel ({_OWN_STEP}).',
    "batch": "The loss is over the whole batch (pairs of rows, the root of a mean), "
    "and a tower sees its own rows: compute it on tw_core.synchronized.gather "
    "(docs/howto/contrastive.md).",
    "log": "A number that train_step returns without a metric is averaged over towers: "
    "return the result of a metric (docs/design/keras.md#differences-from-one-device).",
    "state": "State that is computed from rows is of tower 0's rows: use "
    "sum_over_towers (docs/pitfalls.md#a-step-computes-state-from-its-rows).",
    "float32": "The difference is as small as float32's rounding: something casts to "
    "float32.",
    "unknown": "The cause is unknown: the loss is a mean over rows, so look at what a "
    f"train_step does after it, such as clipping ({_OWN_STEP}).",
    "untested": "The cause is unknown, and the loss could not be computed for parts of "
    f"a batch ({_OWN_STEP}).",
}
CONSTANT_ROWS, NOT_FINITE = _REASONS["rows"], _REASONS["finite"]


class Value(NamedTuple):
    """A number, or a variable, after a step."""

    kind: str  # "loss", "metric", "weight" or "state"
    name: str
    array: Any  # float64


class Difference(NamedTuple):
    """The first value that differs, in which step, counted from 1, and how much.

    Where none does, the step is 0 and the size is that of the largest difference.
    """

    step: int
    value: str
    size: float
    kinds: frozenset[str]  # of all that differ in that step


@dataclass(frozen=True)
class Comparison:
    """The result of training plain Keras and towers side by side.

    Its ``str`` says in at most five lines what differs and why; its truth value is
    ``equal``.

    Attributes:
      equal: whether all values were equal after every step, except for rounding.
      difference: the difference of ``value`` or, if all are equal, the largest one:
        that of its elements over its largest element, or over 0.1 if that is smaller.
      steps: how many batches were trained.
      towers: how many towers trained them.
      dtype: the narrowest float dtype in which the model computes.
      value: ``"loss"``, or the name of the first metric or variable that differs.
      step: after which step it differs, counted from 1; 0 if all are equal.
      reasons: a sentence for each reason.
    """

    equal: bool
    difference: float
    steps: int
    towers: int
    dtype: str
    value: str = ""
    step: int = 0
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        towers = f"{self.towers} tower{'s' * (self.towers != 1)}"
        how = f"({self.steps} step{'s' * (self.steps != 1)}, {towers}, {self.dtype})"
        if self.equal:
            first = f"equal to {self.difference:.0e} {how}"
        elif self.step:
            first = f"differs by {self.difference:.1g} in step {self.step}: "
            first += f"{self.value} {how}"
        else:
            first = f"does not train over {towers} ({self.dtype})"
        lines = [first, *self.reasons]
        if self.dtype != "float64":
            within = f"up to {TOLERANCES[self.dtype]:g} count as equal"
            lines.insert(1, f"In {self.dtype}, in which differences {within}.")
        return "\n".join(lines[:_MAX_LINES])


def narrowest(dtypes: Iterable[str]) -> str:
    """Returns the float dtype that rounds most.

    >>> narrowest(["int32", "float64", "float32"])
    'float32'
    """
    order = list(TOLERANCES)
    known = [dtype for dtype in dtypes if dtype in TOLERANCES]
    return max(known, key=order.index, default="float64")


def first_difference(
    wanted: Sequence[Sequence[Value]], got: Sequence[Sequence[Value]], tolerance: float
) -> Difference:
    """Compares the values after each step."""
    largest = 0.0
    for number, (want, own) in enumerate(zip(wanted, got, strict=True), 1):
        sizes = [
            (relative_difference(one.array, other), one)
            for one, other in _pairs(want, own)
        ]
        if apart := [(size, one) for size, one in sizes if size > tolerance]:
            size, first = apart[0]
            kinds = frozenset(one.kind for _, one in apart)
            return Difference(number, first.name, size, kinds)
        largest = max([largest, *(size for size, _ in sizes)])
    return Difference(0, "", largest, frozenset())


def _pairs(wanted: Sequence[Value], got: Sequence[Value]) -> list[tuple[Value, Any]]:
    """Pairs logs by name, and variables, whose models have other names, by place."""
    logs = ("loss", "metric")
    left = {own.name: own for own in got if own.kind in logs}
    variables = iter([own for own in got if own.kind not in logs])
    pairs = []
    for one in wanted:
        other = left.pop(one.name, None) if one.kind in logs else next(variables)
        pairs.append((one, np.nan if other is None else other.array))
    return [*((own, np.nan) for own in left.values()), *pairs]


def relative_difference(wanted: Any, got: Any) -> float:
    """Returns the largest difference over the largest element; NaN equals nothing.

    >>> relative_difference([1.0, 4.0], [1.0, 5.0])
    0.25
    """
    wanted, got = np.asarray(wanted, np.float64), np.asarray(got, np.float64)
    if wanted.shape != got.shape or not np.isfinite([wanted, got]).all():
        return np.inf
    size = np.max(np.abs(wanted), initial=_FLOOR)
    return float(np.max(np.abs(wanted - got), initial=0.0) / size)


def kind_of_loss(
    rows: Sequence[int], losses: Sequence[Sequence[float]], tolerance: float
) -> str:
    """Returns over what a loss is a mean, from its values for three parts of a batch.

    These have ``rows``; ``losses`` are those of parts a, b, c, ab, bc and abc, for
    several values of the variables. ``"rows"``; ``"weights"``: a mean in which parts
    have other weights, whatever the variables; ``"sum"``; or ``"batch"``, if none of
    these explains the values. A constant may be added to all losses.

    >>> kind_of_loss([1, 1, 2], [[1.0, 2.0, 4.0, 1.5, 10 / 3, 2.75]], 1e-9)
    'rows'
    """
    if all(_are_means(rows, own, tolerance) for own in losses):
        return "rows"
    if all(
        abs(abc - ab - bc + b) <= tolerance * max(map(abs, (a, b, c, ab, bc, abc)))
        for a, b, c, ab, bc, abc in losses
    ):
        return "sum"
    weights = []
    for a, b, c, ab, bc, abc in losses:
        if ab == a or bc == c:
            return "batch"
        # Two equations have the weights of a and c; the third value must agree.
        found = (b - ab) / (ab - a), 1.0, (b - bc) / (bc - c)
        if min(found) < 0 or not _are_means(found, (a, b, c, ab, bc, abc), tolerance):
            return "batch"
        weights.append(found)
    # In a ratio of two sums, such as Dice, they depend on the variables.
    return "weights" if np.allclose(weights, weights[0], rtol=_OF_WEIGHTS) else "batch"


def _are_means(
    weights: Sequence[float], losses: Sequence[float], tolerance: float
) -> bool:
    """Returns whether the losses of joined parts are means of those of the parts."""
    parts, joined = np.array(losses[:3]), losses[3:]
    chosen = np.array([[1, 1, 0], [0, 1, 1], [1, 1, 1]]) * weights
    means = chosen @ parts / chosen.sum(axis=1)
    within = tolerance * max(map(abs, losses))
    return bool(np.allclose(means, joined, rtol=0, atol=within))


def reasons(
    left: Difference,
    *,
    is_random: bool = False,
    unsynchronized: Sequence[str] = (),
    is_untried: bool = False,
    loss: str | None = None,
) -> tuple[str, ...]:
    """Says why trainings differ, as far as it is known.

    ``left``: what differs without random numbers and with layers ``unsynchronized``
    synchronised; ``is_untried``: one of these could not be done.
    ``loss``: what ``kind_of_loss`` returns; None if it was not tried, or failed.
    """
    found = [_REASONS["random"]] * is_random
    if unsynchronized:
        names = ", ".join(unsynchronized[:3]) + ", ..." * (len(unsynchronized) > 3)
        found.append(_REASONS["statistics"].format(names))
    if not left.step:
        how = ["without random numbers"] * is_random
        how += ["with synchronized=True"] * bool(unsynchronized)
        return (*found, f"It is equal to {left.size:.0e} {' and '.join(how)}.")
    if loss in ("weights", "sum", "batch"):
        return (*found, _REASONS[loss])
    if is_untried:
        return (*found, "Whether anything else differs could not be tried.")
    if left.kinds == {"metric"}:
        return (*found, _REASONS["log"])
    if left.kinds == {"state"}:
        return (*found, _REASONS["state"])
    if left.size < _OF_FLOAT32:
        return (*found, _REASONS["float32"])
    return (*found, _REASONS["untested" if loss is None else "unknown"])
