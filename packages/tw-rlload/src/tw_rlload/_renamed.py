"""The old names of arguments, which work for one version, with a warning."""

# Old name -> new name, by what takes them.
PLANNING = {"tail": "remainder"}
LOADING = {"stacks": "num_buffers", "tail": "remainder"}
WAITING = {"timeout_seconds": "timeout_s"}
