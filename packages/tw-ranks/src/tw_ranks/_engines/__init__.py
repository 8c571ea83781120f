"""What carries exchanges below TensorFlow's own collectives: the choice, and MPI."""
