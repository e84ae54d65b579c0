"""What tests of the core share: a device whose copies read their source when they run, and stamped pages."""
