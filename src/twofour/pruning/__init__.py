"""What to prune, how to choose, writing it, and reading it back to judge it."""
