"""TF_CONFIG, servers and devices of a cluster, and parameters pulled in packs.

.. code-block:: python

    task = cluster.read_tf_config()
    server = cluster.start_server(task)
    if task.job == "ps":
        server.join()
    with (
        tf.compat.v1.device(cluster.device_setter(task)),
        cluster.pulled_together(task),
    ):
        model()
"""

import lazy_loader

from tw_core.checks import refusing_unknown

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = refusing_unknown(__name__, __getattr__)
