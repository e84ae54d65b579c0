"""Benchmarks that need a machine of their own."""
