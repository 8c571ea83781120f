"""How tests start programs."""

IN_BACKGROUND = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
"""Begins a command that runs as in the background of a script: SIGINT is ignored."""
