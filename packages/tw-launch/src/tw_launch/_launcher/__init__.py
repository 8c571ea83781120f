"""The command ``tw-launch``: starts the tasks of a machine, and watches them."""
