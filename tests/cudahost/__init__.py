"""A CUDA driver without a GPU, and the suites that run the production CUDA code on it."""
