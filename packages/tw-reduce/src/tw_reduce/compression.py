"""Reducers that send less, and remember the parts that they did not send.

``error_feedback`` around ``top_k``, ``sign``, ``int8`` or a compressor of your own, and
``power_sgd``; ``after`` some updates. A ``tw_reduce.ReducerState`` keeps their memory.
"""

from tw_reduce._checks import named_compressor
from tw_reduce._memory.after import after
from tw_reduce._memory.error_feedback import error_feedback
from tw_reduce._memory.int8 import int8
from tw_reduce._memory.power_sgd import power_sgd
from tw_reduce._memory.protocol import Compressor
from tw_reduce._memory.rows import from_rows, to_row
from tw_reduce._memory.sign import sign
from tw_reduce._memory.top_k import top_k

__all__ = [
    "Compressor",
    "after",
    "error_feedback",
    "from_rows",
    "int8",
    "power_sgd",
    "sign",
    "to_row",
    "top_k",
]

for _make in (top_k, sign, int8):  # passed without parentheses, they are refused too
    named_compressor(_make, f"{_make.__name__}()")
