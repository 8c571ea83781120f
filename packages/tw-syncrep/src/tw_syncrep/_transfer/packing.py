"""Joins tensors into a pack and takes them apart again, as a plan says."""

from collections.abc import Mapping

import tensorflow as tf

from tw_syncrep._transfer.packs import Pack


def join(pack: Pack, tensors: Mapping[int, tf.Tensor]) -> tf.Tensor:
    """Joins the tensors of one pack.

    Args:
      pack: names the tensors by their index.
      tensors: by index.

    Returns:
      The one tensor of the pack as it is, or a flat vector of all of them.
    """
    if pack.is_alone:
        return tensors[pack.pieces[0].index]
    return tf.concat([tf.reshape(tensors[p.index], [-1]) for p in pack.pieces], axis=0)


def take_apart(pack: Pack, joined: tf.Tensor) -> dict[int, tf.Tensor]:
    """Undoes ``join``.

    Returns:
      The tensors by index, on the device in force.
    """
    if pack.is_alone:
        return {pack.pieces[0].index: joined}
    parts = tf.split(joined, [piece.size for piece in pack.pieces])
    return {
        piece.index: tf.reshape(part, piece.shape)
        for piece, part in zip(pack.pieces, parts, strict=True)
    }
