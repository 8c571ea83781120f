"""What the tests of all packages share.

Hypothesis has no deadline, as tracing takes its time, and is the same at every run;
``--hypothesis-profile=default`` explores at random.
"""

import gc
import os
from collections.abc import Iterator

import pytest
from covering import pytest_collection_modifyitems, pytest_configure
from hypothesis import settings

__all__ = ["pytest_collection_modifyitems", "pytest_configure"]

settings.register_profile("repeatable", deadline=None, derandomize=True)
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
