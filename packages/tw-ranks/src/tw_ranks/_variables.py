"""Broadcasts of variables and tensors to all ranks; a check that all have the same."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core.internal import builds_session_graph, without_autograph
from tw_ranks._agreement import Exchange
from tw_ranks._exchanges.broadcasting import (
    broadcast_tensors,
    describe_tensors,
    give_variables,
    name_of,
    read_variable,
)
from tw_ranks._exchanges.collectives import gather, row_spec
from tw_ranks._exchanges.running import run_collectives
from tw_ranks._group import ProcessGroup, endpoint_of


@without_autograph
def broadcast_variables(
    variables: Sequence[Any], *, group: ProcessGroup, root: int = 0
) -> tf.Operation | None:
    """Sends the values of one rank's variables to all ranks.

    Call it after creating variables, and after a restore, for which only the root then
    needs the checkpoint. All ranks pass the same variables in the same order, e.g.
    ``[*model.variables, *optimizer.variables]`` once the optimizer has been built.
    Variables that differ only in path are paired by position: a model that the root
    loaded has other paths than one that a rank built. From then on all collectives use
    rank 0's paths. The random states of Keras layers (``keras.random.SeedGenerator``)
    are the exception: each rank gets its own, derived from the root's, so that dropout
    differs by rank and can be reproduced.

    Args:
      variables: TensorFlow's, resource or reference, or Keras's; of any dtype but
        string, and of fully known shapes.
      group: the ranks.
      root: the rank whose values are sent.

    Returns:
      In a session graph the op that broadcasts; otherwise None, once that is done.

    Raises:
      ValueError: unknown shapes, strings, a root that is not a rank, or variables that
        do not match those of another rank.
      RankTimeoutError: a rank is missing.
    """
    return give_variables(variables, endpoint_of(group), root=root)


@without_autograph
def broadcast(
    tensors: Sequence[Any],
    *,
    group: ProcessGroup,
    root: int = 0,
    names: Sequence[str] = (),
) -> list[tf.Tensor]:
    """Returns one rank's tensors on all ranks.

    Args:
      tensors: [N] of fully known shapes, the same on all ranks; any dtype but string.
      group: the ranks.
      root: the rank whose values are sent.
      names: [N] for messages; ranks must agree on them.

    Returns:
      [N] of the same shapes and dtypes.

    Raises:
      ValueError: as ``broadcast_variables``.
      RankTimeoutError: a rank is missing.
    """
    endpoint = endpoint_of(group)
    return broadcast_tensors(tensors, endpoint=endpoint, root=root, names=names)


@without_autograph
def check_same(variables: Sequence[Any], *, group: ProcessGroup) -> tf.Operation | None:
    """Raises an error if a variable does not have the same bits on all ranks.

    Ranks exchange a 64-bit checksum per variable (farmhash64 of its bytes), which is
    cheap enough for every hundredth step. All ranks call it at the same step, with the
    same variables in the same order, and all raise the same error.

    Args:
      variables: as ``broadcast_variables`` takes them, such as a model's trainable
        ones and its optimizer's; not those that differ by rank, such as random states,
        or statistics of batch normalization that is not synchronised.
      group: the ranks.

    Returns:
      In a session graph the op that checks; otherwise None.

    Raises:
      RuntimeError: some differ; it names the ranks and the first variable. In a session
        or ``tf.function`` a ``tf.errors.UnknownError`` with the same message.
      ValueError: variables that do not match those of another rank.
      RankTimeoutError: a rank is missing.
    """
    is_graph, endpoint = builds_session_graph(), endpoint_of(group)
    if endpoint.size == 1 or not variables:
        return tf.no_op() if is_graph else None
    tensors = [read_variable(variable) for variable in variables]
    names = [name_of(variable) for variable in variables]
    own = [tf.fingerprint(tf.reshape(tensor, [1, -1])) for tensor in tensors]
    sums = tf.stack([tf.bitcast(octets, tf.int64) for octets in own], axis=1)
    [of_all] = run_collectives(
        lambda brought, keys: [gather(brought[0], endpoint, keys[0])],
        [sums],
        specs=[row_spec(sums)],
        endpoint=endpoint,
        exchange=Exchange(
            "a comparison of variables", describe_tensors(tensors, names)
        ),
    )
    if tf.executing_eagerly():
        _refuse_different(of_all.numpy(), names)
        return None
    done = tf.numpy_function(
        lambda found: _refuse_different(found, names), [of_all], []
    )
    return done if is_graph else None


def _refuse_different(sums: np.ndarray, names: Sequence[str]) -> None:
    """Raises if checksums, [size, N], differ between ranks."""
    different = np.flatnonzero((sums != sums[0]).any(axis=0))
    if not different.size:
        return
    column = sums[:, different[0]]
    alike = [np.flatnonzero(column == value).tolist() for value in np.unique(column)]
    told = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        for ranks in sorted(alike, key=len, reverse=True)
    )
    raise RuntimeError(
        f"check_same: {different.size} of {len(names)} variables differ between ranks. "
        f"The first is {names[different[0]]!r}; ranks with the same values of it: "
        f"{told}. Look for anything that ranks do separately (random numbers, a "
        "restore, gradients that are not reduced), and broadcast_variables from one "
        "of them."
    )
