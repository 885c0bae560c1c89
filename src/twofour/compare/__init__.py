"""The measurement: variants, worker processes, rounds."""
