"""Broadcasts variables and tensors to all ranks; checks that all have the same values.

Tensors travel as 32-bit integers, whatever their dtypes are, so that all of them make
one list and every bit arrives.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core import flat_packs
from tw_core.checks import check_whole_number
from tw_core.modes import builds_session_graph, without_autograph
from tw_ranks._agreement import Exchange, TensorSpec, describe_tensor
from tw_ranks._collectives import gather, receive, row_spec, send
from tw_ranks._group import ProcessGroup
from tw_ranks._running import run_collectives

_PACK_BYTES = 64 << 20
"""The most sent at once, which needs twice that memory in addition to the variables."""

_SEEDS_APART = 0x9E3779B1
"""Odd, so that all ranks' seeds differ modulo 2**31; large, so that layers' do, too."""


@without_autograph
def broadcast_variables(
    variables: Sequence[Any], *, group: ProcessGroup, root: int = 0
) -> tf.Operation | None:
    """Gives all ranks the values of one rank's variables.

    Call it after creating variables, and after a restore, for which only the root then
    needs the checkpoint. All ranks pass the same variables in the same order, e.g.
    ``[*model.variables, *optimizer.variables]`` once the optimizer has been built.
    Variables that differ in path alone are paired by position: a model that the root
    has loaded has other paths than one that a rank has built. From then on all
    collectives know them by rank 0's paths. The random states of Keras layers
    (``keras.random.SeedGenerator``) are the exception: each rank gets its own, derived
    from the root's, so that dropout differs by rank and can be reproduced.

    Args:
      variables: of TensorFlow, resource or reference, or of Keras; any dtype but
        string, fully known shapes.
      group: the ranks.
      root: the rank whose values are taken.

    Returns:
      In a session graph the op that broadcasts; otherwise None, once that is done.

    Raises:
      ValueError: unknown shapes, strings, a root that is not a rank, or variables that
        do not match those of another rank.
      RankTimeoutError: a rank is missing.
    """
    tensors = [read_variable(variable) for variable in variables]
    names = [name_of(variable) for variable in variables]
    values = broadcast_tensors(
        tensors, group=group, root=root, names=names, of_variables=True
    )
    offset = (group.rank - root) % group.size * _SEEDS_APART % 2**31
    for n, name in enumerate(names):
        if "seed_generator_state" in name and offset:  # [seed, counter].
            values[n] += tf.constant([offset, 0], values[n].dtype)
    done = [
        _assign(variable, value)
        for variable, value in zip(variables, values, strict=True)
    ]
    return tf.group(*done) if builds_session_graph() else None


@without_autograph
def check_same(variables: Sequence[Any], *, group: ProcessGroup) -> tf.Operation | None:
    """Raises if a variable does not have the same bits on all ranks.

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
      RuntimeError: some differ; ranks and the first variable are named. In a session
        or ``tf.function`` a ``tf.errors.UnknownError`` with the same message.
      ValueError: variables that do not match those of another rank.
      RankTimeoutError: a rank is missing.
    """
    is_graph = builds_session_graph()
    if group.size == 1 or not variables:
        return tf.no_op() if is_graph else None
    tensors = [read_variable(variable) for variable in variables]
    names = [name_of(variable) for variable in variables]
    own = [tf.fingerprint(tf.reshape(tensor, [1, -1])) for tensor in tensors]
    sums = tf.stack([tf.bitcast(octets, tf.int64) for octets in own], axis=1)
    [of_all] = run_collectives(
        lambda brought, keys: [gather(brought[0], group, keys[0])],
        [sums],
        specs=[row_spec(sums)],
        group=group,
        exchange=Exchange("a comparison of variables", _describe(tensors, names)),
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
        f"{told}. Look for what ranks do by themselves (random numbers, a restore, "
        "gradients that are not reduced), and broadcast_variables from one of them."
    )


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
      root: the rank whose values are taken.
      names: [N] for messages; ranks must agree on them.

    Returns:
      [N] of the same shapes and dtypes.

    Raises:
      ValueError: as ``broadcast_variables``.
      RankTimeoutError: a rank is missing.
    """
    return broadcast_tensors(tensors, group=group, root=root, names=names)


def broadcast_tensors(
    tensors: Sequence[Any],
    *,
    group: ProcessGroup,
    root: int,
    names: Sequence[str] = (),
    label: str = "",
    of_variables: bool = False,
) -> list[tf.Tensor]:
    """Broadcasts as ``broadcast`` does; ranks match it by its ``label``, if any.

    The ``names`` are paths if they are ``of_variables``, which may differ.
    """
    check_whole_number(root=root, at_least=0)
    if root >= group.size:
        raise ValueError(f"broadcast: root must be below {group.size}; got {root}.")
    known = [tf.convert_to_tensor(tensor) for tensor in tensors]
    faults = [
        f"{names[n] if names else n} ({tensor.dtype.name} {tensor.shape})"
        for n, tensor in enumerate(known)
        if tensor.dtype == tf.string or not tensor.shape.is_fully_defined()
    ]
    if faults:
        raise ValueError(
            "broadcast: takes tensors of known shapes, and no strings; got "
            f"{', '.join(faults)}."
        )
    if group.size == 1 or not known:
        return known
    results: list[tf.Tensor] = []
    for positions in _chunks(known):
        labels = [names[n] for n in positions] if names else []
        pack = [known[n] for n in positions]
        exchange = Exchange(
            "a broadcast",
            _describe(pack, labels),
            (("root", str(root)),),
            label,
            of_variables=of_variables,
        )
        results += _broadcast_pack(pack, group, root, exchange)
    return results


def _chunks(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    chunks: list[list[int]] = [[]]
    size = 0
    for n, tensor in enumerate(tensors):
        own = tensor.shape.num_elements() * tensor.dtype.size
        if chunks[-1] and size + own > _PACK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(n)
        size += own
    return chunks


def _broadcast_pack(
    tensors: Sequence[tf.Tensor], group: ProcessGroup, root: int, exchange: Exchange
) -> list[tf.Tensor]:
    words = [_to_words(tensor) for tensor in tensors]
    pack = flat_packs.join(words)
    count = pack.shape[0]
    if not count:  # TensorFlow's broadcast does not take empty tensors.
        pack = tf.zeros([1], pack.dtype)

    def body(brought: list[tf.Tensor], keys: list[int]) -> list[tf.Tensor]:
        if group.rank == root:
            return [send(brought[0], group, keys[0])]
        spec = tf.TensorSpec(pack.shape, pack.dtype)
        return [receive(spec, group, keys[0], root=root)]

    [received] = run_collectives(body, [pack], group=group, exchange=exchange)
    parts = flat_packs.cut(received[:count], [word.shape for word in words])
    return [
        _from_words(part, tensor.shape, tensor.dtype)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def _describe(
    tensors: Sequence[tf.Tensor], names: Sequence[str]
) -> tuple[TensorSpec, ...]:
    return tuple(map(describe_tensor, tensors, names or [""] * len(tensors)))


def _to_words(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's bits as int32 [words]; bytes are padded to whole words."""
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    flat = tf.reshape(tensor, [-1])
    if tensor.dtype.size < 4:
        octets = tf.reshape(_as_bits(flat, tf.uint8), [-1])
        flat = tf.reshape(tf.pad(octets, [[0, -octets.shape[0] % 4]]), [-1, 4])
    words = _as_bits(flat, tf.int32)
    return words if words.shape.rank == 1 else tf.reshape(words, [-1])


def _from_words(words: tf.Tensor, shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
    """Reverses ``_to_words``."""
    if dtype.size < 4:
        octets = tf.reshape(tf.bitcast(words, tf.uint8), [-1])
        words = octets[: shape.num_elements() * dtype.size]
    if dtype.size > words.dtype.size:
        words = tf.reshape(words, [-1, dtype.size // words.dtype.size])
    values = tf.cast(words, dtype) if dtype == tf.bool else _as_bits(words, dtype)
    return tf.reshape(values, shape)


def _as_bits(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tensor if tensor.dtype == dtype else tf.bitcast(tensor, dtype)


def name_of(variable: Any) -> str:
    """Returns the name of a variable of TensorFlow or Keras, the same on all ranks."""
    return str(getattr(variable, "path", None) or variable.name)


def read_variable(variable: Any) -> tf.Tensor:
    """Returns the value of a variable of TensorFlow or Keras."""
    if hasattr(variable, "read_value"):
        return variable.read_value()
    return tf.convert_to_tensor(variable)


def _assign(variable: Any, value: tf.Tensor) -> Any:
    if builds_session_graph():
        return tf.compat.v1.assign(variable, value)
    return variable.assign(value)
