"""Training over the processes of a group: what ranks agree on, exchange and return."""
