"""What a step does and waits for, and whether a machine's devices work.

``record_steps`` records the timeline of steps: what each device did, for whom, and what
it waited for. ``StepRecorder`` has the steps, as data, as a table, as a picture and as
a trace file; ``merge_traces`` joins the files of several processes. The command
``tw-doctor`` checks and measures these packages on a machine's devices.
"""

import lazy_loader

from tw_core.internal import refusing_unknown

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = refusing_unknown(__name__, __getattr__)
