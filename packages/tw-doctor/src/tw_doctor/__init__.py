"""Timelines of training steps, and checks of a machine's devices.

``record_steps`` records the timeline of steps: the operations of each device, their
towers, and its waits. ``StepRecorder`` offers the steps as data, as a table, as a
picture and as a trace file; ``merge_traces`` joins the files of several processes. The
command ``tw-doctor`` checks and measures these packages on a machine's devices.
"""

import lazy_loader

from tw_core.internal import refusing_unknown

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = refusing_unknown(__name__, __getattr__)
