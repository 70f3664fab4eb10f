"""The programs: train, evaluate, compare, harness, and their command line."""
