"""The measurement behind `twofour compare`: variants, worker processes, rounds."""
