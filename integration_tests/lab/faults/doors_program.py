"""A fit over two ranks, which says where its doors are, then what it has learned.

Rank 1 reaches rank 0 at the second port of ``DOORS``, a relay to the first.
"""

import hashlib
import os
import time

if os.environ.get("PMI_PORT"):
    print("pmi", os.environ["PMI_PORT"].partition(":")[2], os.environ["PMI_ID"])

import keras
import numpy as np

import tw_ranks
from tw_core import use_logical_cpus
from tw_keras import TowerModel

NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "TW_NODE_RANK")
rank = int(next(os.environ[name] for name in NAMES if name in os.environ))
port = os.environ["DOORS"].split()[rank]
group = tw_ranks.join(f"127.0.0.1:{port}", rank=rank, size=2)
keras.utils.set_random_seed(0)
rows = np.random.default_rng(0).integers(0, 9, size=(256, 8)).astype("float32")


def make_model() -> keras.Model:
    return keras.Sequential([keras.Input([8]), keras.layers.Dense(4)])


class Slowly(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        time.sleep(0.02)


model = TowerModel(make_model, use_logical_cpus(1), group=group, data="shared")
model.compile(keras.optimizers.SGD(1e-4), "mse")
print("trains", flush=True)
model.fit(rows, rows[:, :4], batch_size=32, epochs=30, verbose=0, callbacks=[Slowly()])
weights = b"".join(weight.tobytes() for weight in model.get_weights())
print("learned", hashlib.sha256(weights).hexdigest(), flush=True)
group.leave()
