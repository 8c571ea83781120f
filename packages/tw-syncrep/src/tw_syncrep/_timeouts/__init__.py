"""What bounds each wait: deadlines, the state of a run, and the errors raised."""
