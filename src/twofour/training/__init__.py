"""Training a pruned module: zeros stay zeros, distillation, means over valid positions."""
