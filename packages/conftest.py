"""What the tests of all packages share.

Hypothesis has no deadline, as tracing takes its time, and is the same at every run, of
25 examples by day and 100 by night. ``--hypothesis-profile=default`` explores at
random.
"""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from quick import (
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_sessionfinish,
)

__all__ = ["pytest_collection_modifyitems", "pytest_configure", "pytest_sessionfinish"]

examples = 100 if os.environ.get("TOWERS_TESTS") == "full" else 25
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=examples
)
settings.load_profile("repeatable")
os.environ["TW_REPORTS"] = ""  # Errors carry their reports, and write no files.


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """What a module leaves behind, as the graphs of TensorFlow's functions, stays.

    Collecting garbage would look at all of it again and again: after a thousand tests
    it takes tens of seconds.
    """
    yield
    gc.collect()
    gc.freeze()
