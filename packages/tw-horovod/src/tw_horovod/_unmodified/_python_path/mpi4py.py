"""mpi4py where it is installed; otherwise what programs of Horovod call of it."""

from tw_horovod._unmodified import mpi_names

mpi_names.find(__name__, __file__)
