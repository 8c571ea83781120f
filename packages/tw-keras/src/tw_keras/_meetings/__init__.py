"""Where the steps of all towers meet: losses, metrics and updates."""
