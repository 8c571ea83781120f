"""Broadcasts of tensors and variables over an endpoint.

Tensors of all dtypes are sent as 32-bit integers, so that they form one list and every
bit arrives.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_core.internal import (
    builds_session_graph,
    check_whole_number,
    cut_flat,
    join_flat,
)
from tw_ranks._agreement import Exchange, TensorSpec, describe_tensor
from tw_ranks._endpoint.endpoint import Endpoint
from tw_ranks._exchanges.collectives import receive, send
from tw_ranks._exchanges.running import run_collectives

_PACK_BYTES = 64 << 20
"""The most sent at once, which needs twice that memory in addition to the variables."""

_SEEDS_APART = 0x9E3779B1
"""Odd, so that all ranks' seeds differ modulo 2**31; large, so that layers' do, too."""


def give_variables(
    variables: Sequence[Any], endpoint: Endpoint, *, root: int
) -> tf.Operation | None:
    """Sends the root's values to all ranks; see ``broadcast_variables``."""
    tensors = [read_variable(variable) for variable in variables]
    names = [name_of(variable) for variable in variables]
    values = broadcast_tensors(
        tensors, endpoint=endpoint, root=root, names=names, of_variables=True
    )
    offset = (endpoint.rank - root) % endpoint.size * _SEEDS_APART % 2**31
    for n, name in enumerate(names):
        if "seed_generator_state" in name and offset:  # [seed, counter].
            values[n] += tf.constant([offset, 0], values[n].dtype)
    pairs = zip(variables, values, strict=True)
    if builds_session_graph():
        return tf.group(*(tf.compat.v1.assign(own, value) for own, value in pairs))
    for own, value in pairs:
        own.assign(value)
    return None


def broadcast_tensors(
    tensors: Sequence[Any],
    *,
    endpoint: Endpoint,
    root: int,
    names: Sequence[str] = (),
    label: str = "",
    of_variables: bool = False,
) -> list[tf.Tensor]:
    """Broadcasts as ``broadcast`` does; ranks match it by its ``label``, if any.

    With ``of_variables`` the ``names`` are paths, which may differ.
    """
    check_whole_number(root=root, at_least=0)
    if root >= endpoint.size:
        raise ValueError(f"broadcast: root must be below {endpoint.size}; got {root}.")
    known = [tf.convert_to_tensor(tensor) for tensor in tensors]
    faults = [
        f"{names[n] if names else n} ({tensor.dtype.name} {tensor.shape})"
        for n, tensor in enumerate(known)
        if tensor.dtype == tf.string or not tensor.shape.is_fully_defined()
    ]
    if faults:
        raise ValueError(
            "broadcast: tensors must have known shapes and not be strings; got "
            f"{', '.join(faults)}."
        )
    if endpoint.size == 1 or not known:
        return known
    results: list[tf.Tensor] = []
    for positions in _chunks(known):
        labels = [names[n] for n in positions] if names else []
        pack = [known[n] for n in positions]
        exchange = Exchange(
            "a broadcast",
            describe_tensors(pack, labels),
            (("root", str(root)),),
            label,
            of_variables=of_variables,
        )
        results += _broadcast_pack(pack, endpoint, root, exchange)
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
    tensors: Sequence[tf.Tensor], endpoint: Endpoint, root: int, exchange: Exchange
) -> list[tf.Tensor]:
    words = [_to_words(tensor) for tensor in tensors]
    pack = join_flat(words)
    count = pack.shape[0]
    if not count:  # TensorFlow's broadcast does not take empty tensors.
        pack = tf.zeros([1], pack.dtype)

    def body(brought: list[tf.Tensor], keys: list[int]) -> list[tf.Tensor]:
        if endpoint.rank == root:
            return [send(brought[0], endpoint, keys[0])]
        spec = tf.TensorSpec(pack.shape, pack.dtype)
        return [receive(spec, endpoint, keys[0], root=root)]

    [received] = run_collectives(body, [pack], endpoint=endpoint, exchange=exchange)
    parts = cut_flat(received[:count], [word.shape for word in words])
    return [
        _from_words(part, tensor.shape, tensor.dtype)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def describe_tensors(
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
