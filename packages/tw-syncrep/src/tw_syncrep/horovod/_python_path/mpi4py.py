"""mpi4py where it is installed; otherwise what programs of Horovod call of it."""

from tw_syncrep.horovod import _mpi_names

_mpi_names.find(__name__, __file__)
