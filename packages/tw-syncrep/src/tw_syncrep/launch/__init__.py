"""``tw-launch``: starts the tasks of a cluster on this machine, with TF_CONFIG set.

tw-launch --ps 1 --workers 2 -- python train.py --epochs 3
"""

from tw_syncrep.launch._main import main

__all__ = ["main"]
