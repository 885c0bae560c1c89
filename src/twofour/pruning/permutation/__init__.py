"""Channel permutation: which order of the channels loses least to N:M, and where it may change."""
