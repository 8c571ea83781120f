"""Compression of gradients for transfer."""

from typing import Any

import tensorflow as tf


class Compressor:
    """Compresses a tensor before it is sent, and decompresses the result."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor to send, and the context for ``decompress``."""
        raise NotImplementedError("Compressor.compress: to be written by a subclass.")

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the result as it would be without compression."""
        raise NotImplementedError("Compressor.decompress: to be written by a subclass.")


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floats as float16; they are added in float32."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns floats as float16, other dtypes as they are; and the dtype."""
        return _narrowed(tensor, tf.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the tensor in its original dtype."""
        return tf.cast(tensor, ctx)


class BF16Compressor(Compressor):
    """Sends floats as bfloat16; they are added in float32. Horovod lacks it."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns floats as bfloat16, other dtypes as they are; and the dtype."""
        return _narrowed(tensor, tf.bfloat16), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the tensor in its original dtype."""
        return tf.cast(tensor, ctx)


class Compression:
    """The compressors by name.

    Attributes:
      none: tensors as they are.
      fp16: floats as float16.
      bf16: floats as bfloat16.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def _narrowed(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tensor, dtype) if tensor.dtype.is_floating else tensor
