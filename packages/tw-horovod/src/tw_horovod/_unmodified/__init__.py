"""Programs of Horovod that run as they are: the names that they import."""
