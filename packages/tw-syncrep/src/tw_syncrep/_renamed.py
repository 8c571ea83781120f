"""Old public names that still work in this version, with a warning."""

CLUSTER_NAMES = {"mirrors": "tw_syncrep.cluster.cached_parameters"}
"""Of ``tw_syncrep.cluster``. Renamed arguments and attributes are declared with the new
name, by ``renamed_arguments`` and ``renamed_attribute``."""
