"""Runs a failed step again: to find an error that TensorFlow lost, or without XLA."""

import itertools
import logging
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import tensorflow as tf

from tw_keras import _batches
from tw_keras._keras_compat import replaced

_log = logging.getLogger(__name__)
# Finds in a message what XLA cannot compile: a variable on another device, the last if
# there are several; else the first node, by any of the wordings of XLA and of tw_core.
_OPERATION = re.compile(
    r"(?s)(?:.*access resource |.*?(?:; got |\[id=\d+ |node `?))(?P<name>[^`}\s,]+)"
)
_CONSEQUENCE = re.compile(
    "RecvAsync is cancelled|Function was cancelled before it was started"
)


def or_without_xla(run: Callable[[Any], Any], name: str, model: Any, steps: Any) -> Any:
    """Wraps a model's step function ``name``, to continue without XLA if that fails.

    XLA fails as a step first runs, before it updates; in a call of several steps a
    batch may be lost.
    """

    def run_or_fall_back(data: Any) -> Any:
        taken: list[Any] = []
        try:
            with _keeping(taken, data):
                return run(data)
        except (tf.errors.OpError, ValueError) as error:
            has_run = isinstance(error, tf.errors.OpError)
            # A trace refuses by this word; the program's errors may have its letters.
            if not re.search("(?i)xla" if has_run else r"\bXLA\b", str(error)):
                raise
            found = _OPERATION.match(str(error))
            what = found["name"].rstrip(".") if found else "a step"
            may_fall_back = steps.copies.may_fall_back
            last = steps.last.take() if has_run and may_fall_back else None
            batches = [batch.get_value() for batch in taken]
            if last is not None and not batches:
                batches = [last[1]]
            # Without the batch that a step has taken, steps cannot go on.
            if not may_fall_back or (has_run and not batches):
                error.add_note(
                    f"TowerModel: XLA cannot compile {what}; rewrite it, or use "
                    "compile(jit_compile=False)."
                )
                raise
        _log.warning("TowerModel: steps run without XLA, which cannot compile %s", what)
        steps.copies.setting.jit_compile = False
        model.train_function = model.test_function = model.predict_function = None
        getattr(model, f"make_{name}")()
        if batches and name != "predict_function":  # taken from an iterator
            data = itertools.chain(batches, data)
        return getattr(model, name)(data)

    return run_or_fall_back


def _keeping(taken: list[Any], data: Any) -> AbstractContextManager[None]:
    """Keeps the batch that Keras takes from an iterator, from 3.16 on untraced."""

    def keeping(take: Callable[[], Any]) -> Callable[[], Any]:
        def keep() -> Any:
            taken[:] = [take()]
            return taken[0]

        return keep

    if not isinstance(data, tf.data.Iterator):
        return nullcontext()
    return replaced(data, "get_next_as_optional", keeping)


@contextmanager
def naming_what_failed(steps: Any) -> Iterator[None]:
    """Raises the error of which TensorFlow raises only a consequence, a cancellation.

    An operation that fails in a function's call cancels the receives of its device,
    and calls that are about to start, before the call itself fails. TensorFlow raises
    that cancellation, unless calls are inlined.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        with suppress(Exception):  # of a batch that cannot be cut, as the error says
            steps.note_rows(error)
        raise
    except tf.errors.CancelledError as error:
        if not _CONSEQUENCE.search(str(error)):
            raise
        try:
            steps.run_again()
        except (tf.errors.OpError, RuntimeError) as found:
            found.add_note(
                "TowerModel: TensorFlow raised only the cancellation of an operation "
                "that waited for this one. This error was found when the towers' parts "
                "of the batch ran again, one by one."
            )
            raise found from error
        except Exception:  # of code that cannot run eagerly
            pass
        error.add_note(
            "TowerModel: an operation in a tower failed, and TensorFlow raised the "
            "cancellation of one that waited for it. The towers' parts of the batch "
            "ran again, one by one, without an error. TensorFlow's log on stderr has "
            "the cause ('aborting with status'); with TowerModel(..., inline=True) the "
            "error names the operation and its line."
        )
        raise
    finally:
        steps.last.forget()


class LastBatch:
    """The batch of the current or last step, held without a copy.

    Held in a TensorFlow staging area: a step that creates variables is traced twice.
    """

    def __init__(self) -> None:
        self._kinds: list[tuple[str, Any]] = []
        name = f"tw_keras/last_batch_{uuid.uuid4().hex}"
        self._kind, self._data = f"{name}/kind", f"{name}/data"

    def hold(self, method: str, data: Any) -> Any:
        """Holds the batch of a step being traced; returns it, available once held."""
        kind = [tf.constant(len(self._kinds))]
        self._kinds.append((method, _batches.specs(data)))
        with tf.device("/cpu:0"):
            with tf.control_dependencies(self.forget()):
                held = [
                    tf.raw_ops.Stage(values=kind, shared_name=self._kind),
                    tf.raw_ops.Stage(values=_leaves(data), shared_name=self._data),
                ]
            with tf.control_dependencies(held):
                return tf.nest.map_structure(
                    lambda leaf: None if leaf is None else tf.identity(leaf),
                    *(data,),
                    expand_composites=True,
                )

    def forget(self) -> list[tf.Operation]:
        """Frees the batch."""
        with tf.device("/cpu:0"):
            return [
                tf.raw_ops.StageClear(dtypes=[tf.int32], shared_name=name)
                for name in (self._kind, self._data)
            ]

    def take(self) -> tuple[str, Any] | None:
        """Returns the method and its batch, or None without a batch."""
        with tf.device("/cpu:0"):
            if not int(tf.raw_ops.StageSize(dtypes=[tf.int32], shared_name=self._data)):
                return None
            [kind] = tf.raw_ops.Unstage(dtypes=[tf.int32], shared_name=self._kind)
            method, specs = self._kinds[int(kind)]
            dtypes = [leaf.dtype for leaf in _leaves(specs)]
            values = tf.raw_ops.Unstage(dtypes=dtypes, shared_name=self._data)
        held = iter(values)
        leaves = [
            None if leaf is None else next(held)
            for leaf in tf.nest.flatten(specs, expand_composites=True)
        ]
        return method, tf.nest.pack_sequence_as(specs, leaves, expand_composites=True)


def _leaves(data: Any) -> list[Any]:
    leaves = tf.nest.flatten(data, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None]
