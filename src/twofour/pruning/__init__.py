"""Choosing weights, pruning and writing them, and reading them back to judge them."""
