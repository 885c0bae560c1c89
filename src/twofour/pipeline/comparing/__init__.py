"""The comparison: which variants, each in a process of its own, measured in rounds."""
