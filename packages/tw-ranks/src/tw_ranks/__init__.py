"""Processes that train together without servers: all-reduce, broadcast, uneven data.

.. code-block:: python

    group = tw_ranks.join()
    tw_ranks.broadcast_variables(model.variables, group=group)


    @group.bounded
    @tf.function
    def step(batch):
        [grads] = tw_ranks.mean_across([gradients(batch)], group=group)
        optimizer.apply(grads, model.trainable_variables)
"""

import lazy_loader

from tw_core.internal import refusing_unknown

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = refusing_unknown(__name__, __getattr__)
