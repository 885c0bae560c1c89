"""What 2:4 can gain before anything is pruned: measured kernel times, GPUs, a model's products."""
