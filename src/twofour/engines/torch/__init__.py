"""torch as an engine: eager, compiled, INT8 and 2:4 semi-structured."""
