"""Old argument names, which still work for one version, with a warning."""

# Old name -> new name, per group of functions.
PLANNING = {"tail": "remainder"}
LOADING = {"stacks": "num_buffers", "tail": "remainder"}
WAITING = {"timeout_seconds": "timeout_s"}
