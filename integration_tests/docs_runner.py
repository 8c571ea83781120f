"""A process that runs the code blocks of pages, one page after the other.

TensorFlow takes seconds to import, and has one number of logical CPUs a process:
so one such process runs all pages of a number. It reads a JSON line a page from
its standard input, ``{"page": ..., "blocks": [[line, code], ...]}``, and answers
with a line on the descriptor that it is given, null or a traceback.
"""

import json
import os
import sys
import traceback
from typing import Any


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for line in sys.stdin:
            task = json.loads(line)
            start_afresh()
            print(f"== {task['page']}", flush=True)
            answers.write(json.dumps(run(**task)) + "\n")
            answers.flush()


def start_afresh() -> None:
    import keras
    import tensorflow as tf

    tf.compat.v1.reset_default_graph()
    keras.utils.clear_session()
    tf.random.set_seed(0)


def run(page: str, blocks: list[tuple[int, str]]) -> str | None:
    """Runs a page's blocks in order, in one namespace."""
    names: dict[str, Any] = {"__name__": "__page__"}
    for line, code in blocks:
        try:
            # Empty lines before the code: tracebacks then tell the page's lines.
            exec(compile("\n" * (line - 1) + code, page, "exec"), names)
        except BaseException:
            return traceback.format_exc()
    return None


if __name__ == "__main__":
    main()
