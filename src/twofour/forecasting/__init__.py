"""What 2:4 can gain before anything is pruned: GPUs, kernels measured elsewhere, a whole model."""
