"""One update, as a row of stages; docs/design/update.md has the picture."""
