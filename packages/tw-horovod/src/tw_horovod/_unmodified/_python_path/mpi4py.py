"""mpi4py if it is installed; otherwise the part of it that Horovod programs call."""

from tw_horovod._unmodified import mpi_names

mpi_names.find(__name__, __file__)
