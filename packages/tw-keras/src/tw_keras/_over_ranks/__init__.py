"""Training over the processes of a group: agreement, exchanges and results."""
