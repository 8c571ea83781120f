"""A process that runs the code blocks of pages: ``docs_runner.py PAGE ...``.

Sybil finds the blocks and runs those of a page in order, in one namespace. TensorFlow
takes seconds to import, and has one number of logical CPUs a process: so one such
process runs all pages of a number.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

sys.path.insert(0, str(Path(__file__).parents[1]))  # It is run by its path.
from harness.docs_blocks import Block

DEADLINE_S = 240  # of a block


class Evaluator(PythonEvaluator):
    """Runs all blocks but those that are files, which a page starts otherwise."""

    def __call__(self, example: Example) -> None:
        if not Block("python", example.parsed, example.line).file_name:
            super().__call__(example)


def start_afresh(names: dict[str, Any]) -> None:
    """Leaves nothing of the page before."""
    import keras
    import tensorflow as tf

    tf.compat.v1.reset_default_graph()
    keras.utils.clear_session()
    tf.random.set_seed(0)
    names["__name__"] = "__page__"


python = CodeBlockParser("python", Evaluator())
pages = Sybil(parsers=[python], patterns=["*.md"], setup=start_afresh, path="/")
pytest_collect_file = pages.pytest()


def main() -> int:
    # Without the repository's settings, by which warnings could be errors.
    alone = ("-c", os.devnull, "--noconftest", "-p", "no:cacheprovider")
    end = ("--timeout", str(DEADLINE_S), "--timeout-method", "thread")
    own = [sys.modules[__name__]]
    return pytest.main(["-q", *alone, *end, *sys.argv[1:]], plugins=own)


if __name__ == "__main__":
    sys.exit(main())
