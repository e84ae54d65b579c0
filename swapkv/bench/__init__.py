"""Benchmarks of the parts: `swapkv bench …`. Ratios are measured within one run, ways in turn."""
