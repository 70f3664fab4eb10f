"""Cost of a run before it starts: compiled by the real compilers, without devices."""
