"""What gradients travel as."""

from typing import Any

import tensorflow as tf


class Compressor:
    """Changes a tensor before it is sent, and what came of it back."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns what is sent, and what ``decompress`` needs to know."""
        raise NotImplementedError("Compressor.compress: to be written by a subclass.")

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the result as it would be uncompressed."""
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
        """Returns floats as float16, others as they are, and the dtype."""
        return _narrowed(tensor, tf.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns it in the dtype that it had."""
        return tf.cast(tensor, ctx)


class BF16Compressor(Compressor):
    """Sends floats as bfloat16; they are added in float32. Horovod has none such."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns floats as bfloat16, others as they are, and the dtype."""
        return _narrowed(tensor, tf.bfloat16), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns it in the dtype that it had."""
        return tf.cast(tensor, ctx)


class Compression:
    """The compressors by name.

    Attributes:
      none: as they are.
      fp16: floats as float16.
      bf16: floats as bfloat16.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def _narrowed(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tensor, dtype) if tensor.dtype.is_floating else tensor
