"""One device's logs, where Keras's differ from batch to batch."""

import sys
from pathlib import Path

import keras
import pytest
from keras.src.trainers.compile_utils import CompileLoss

from tw_core.testing import start_logical_cpus

start_logical_cpus()
# What several tests share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))

UNEVEN = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16)


@pytest.fixture(autouse=UNEVEN)
def outputs_losses_count_batches_once(monkeypatch):
    """Makes all batches count once in the loss of an output, as before Keras 3.16.

    There a batch counts by its rows if the trace that it runs in knows their number,
    and else as one row: a last batch that is shorter hardly counts.
    """
    build = CompileLoss.build

    def built(self, *args):
        build(self, *args)
        for own in self.metrics:
            plain = own.update_state
            own.update_state = lambda values, sample_weight=None, plain=plain: plain(
                values
            )

    monkeypatch.setattr(CompileLoss, "build", built)


@pytest.fixture
def in_float64():
    """Computes in float64, so that what differs differs by a fault."""
    from harness.casts import float64

    with float64():
        yield
