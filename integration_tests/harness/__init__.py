"""What tests, the soak and benchmarks share: above all processes, started and ended."""
