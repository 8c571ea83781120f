"""Compares towers with plain Keras, and finds out why they differ.

Reasons are found by experiments: the model is trained with other random numbers and
without any, with synchronised layers, and on parts of a batch.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np

from tw_core import Tower
from tw_core import towers as make_towers
from tw_core.internal import check_function, check_whole_number
from tw_keras._checks import check_needs_nothing
from tw_keras._comparing import verdict
from tw_keras._comparing.trial import (
    Compile,
    Plain,
    Trial,
    dtypes_of,
    freeze_statistics,
    silence,
    synchronize,
    take_batches,
    unsynchronized_of,
)
from tw_keras._comparing.verdict import Comparison, Difference


def compare(
    make_model: Callable[[], keras.Model],
    data: Any,
    devices: Sequence[int | str | Tower] | int | None = None,
    *,
    compile: Compile | None = None,
    steps: int = 3,
    **options: Any,
) -> Comparison:
    """Trains plain Keras and a ``TowerModel`` on the same batches, and compares them.

    Both start with the same weights. The loss, metrics and all variables are compared
    after each step, in float64 if the model can be trained in it. Sets Keras's random
    seed.

    Args:
      make_model: as for ``TowerModel``.
      data: a ``tf.data.Dataset`` or another iterable of batches; or arrays, ``x`` or a
        tuple ``(x, y)`` or ``(x, y, sample_weight)``, which are cut into batches of up
        to 32 rows that do not divide evenly among the towers.
      devices: as for ``TowerModel``.
      compile: a dict of the arguments of ``compile``, whose optimizers, losses and
        metrics are copied by their configuration; or a function that compiles the model
        that it is given. None if ``make_model`` compiles it.
      steps: how many batches to train; fewer if the data has fewer.
      **options: of ``TowerModel``, such as ``weights``.

    Returns:
      The verdict, which is true if all are equal; its ``str`` says what differs and
      why.

    Raises:
      ValueError: no batch, no device, ``steps`` below 1, or a model that is not
        compiled.
      TypeError: a wrong kind of ``make_model``, ``devices``, ``compile`` or ``steps``.
      Exception: any error that plain Keras raises, or that ``TowerModel`` raises for
        another reason than the number of rows.

    >>> import keras
    >>> import numpy as np
    >>> def make_model():
    ...     return keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> x = np.random.default_rng(0).normal(size=[64, 3])
    >>> settings = {"optimizer": "adam", "loss": "mse"}
    >>> result = compare(make_model, (x, x[:, :1]), ["/cpu:0"] * 2, compile=settings)
    >>> result.equal, result.steps, result.dtype
    (True, 3, 'float64')
    """
    check_function(make_model=make_model)
    check_needs_nothing(make_model)
    if not (compile is None or isinstance(compile, dict) or callable(compile)):
        raise TypeError(
            "compile must be a dict of compile's arguments, or a function that "
            f"compiles a model; got {compile!r}."
        )
    check_whole_number(steps=steps, at_least=1)
    towers = make_towers(devices)
    batches, is_static = take_batches(data, steps, len(towers))
    trial = Trial(make_model, compile, batches, is_static, towers, options)
    with _keeping_settings():
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        exact = trial.in_float64()
        try:
            plain = exact.train_plain()
        except Exception:
            pass  # It cannot be trained in float64, or not at all.
        else:
            return _judge(exact, plain)
    with _keeping_settings():
        return _judge(trial, trial.train_plain())


@contextmanager
def _keeping_settings() -> Iterator[None]:
    """Restores Keras's dtypes, and silences TensorFlow's warnings of many traces."""
    log = logging.getLogger("tensorflow")
    before = keras.config.floatx(), keras.config.dtype_policy(), log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])
        log.setLevel(before[2])


def _judge(trial: Trial, plain: Plain) -> Comparison:
    dtype = verdict.narrowest(dtypes_of(plain.model))
    tolerance = verdict.TOLERANCES[dtype]
    judged = partial(
        Comparison, steps=len(trial.batches), towers=len(trial.towers), dtype=dtype
    )
    try:
        record = trial.train_towers(plain.start)
    except Exception:
        if not trial.fails_on_a_part():
            raise
        return judged(False, np.inf, reasons=(verdict.CONSTANT_ROWS,))
    found = verdict.first_difference(plain.record, record, tolerance)
    if not found.step:
        return judged(True, found.size)
    return judged(
        *(False, found.size),
        value=found.value,
        step=found.step,
        reasons=_reasons(trial, plain, found, tolerance),
    )


def _reasons(
    trial: Trial, plain: Plain, found: Difference, tolerance: float
) -> tuple[str, ...]:
    """Trains again, each time with a possible reason removed."""
    start, names, left = plain.start, list[str](), found
    could = unsynchronized_of(plain.model)
    if not all(np.isfinite(own.array).all() for step in plain.record for own in step):
        return (verdict.NOT_FINITE,)

    def is_random(plain: Plain) -> bool:
        again = trial.train_with_other_numbers(start)
        return verdict.first_difference(plain.record, again, tolerance).step > 0

    was_random = is_untried = is_random(plain)
    if was_random:
        trial = trial.changed(silence)
        plain = trial.train_plain(start)
        is_untried = is_random(plain)  # Some noise has no rate.
        if not is_untried:
            got = trial.train_towers(start)
            left = verdict.first_difference(plain.record, got, tolerance)
    if left.step and not is_untried:
        names = could
    if names:
        trial = trial.changed(synchronize)
        try:
            got = trial.train_towers(start)
        except ValueError:  # A train_step must be written for synchronised layers.
            is_untried = True
        else:
            wanted = trial.train_plain(start).record
            left = verdict.first_difference(wanted, got, tolerance)
    kind, has_noise = None, was_random and left is found
    if left.step and not has_noise:
        narrow = max(tolerance / 100, verdict.TOLERANCES["float64"])
        kind = trial.changed(freeze_statistics).kind_of_loss(start, narrow)
    return verdict.reasons(
        left,
        is_random=was_random,
        unsynchronized=names,
        is_untried=is_untried,
        loss=kind,
    )
