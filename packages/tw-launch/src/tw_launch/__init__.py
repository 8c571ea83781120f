"""TF_CONFIG, addresses and servers of a cluster, and the command ``tw-launch``.

.. code-block:: python

    task = tw_launch.read_tf_config()
    server = tw_launch.start_server(task)
    if task.job == "ps":
        server.join()
"""

import lazy_loader

from tw_core.internal import refusing_unknown

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = refusing_unknown(__name__, __getattr__)
