"""Where parameters lie in a cluster, and how workers pull them in packs."""
