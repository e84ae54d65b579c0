"""Everything that has to be seen on a GPU: `python -m benchmarks.gpu.run_all`."""
