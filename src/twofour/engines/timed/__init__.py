"""Loaded models that can be run and timed, one module per engine, for `twofour compare`."""
