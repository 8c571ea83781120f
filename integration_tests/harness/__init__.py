"""Processes of tests, the soak and benchmarks: started, talked to, and ended."""
