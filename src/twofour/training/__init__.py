"""Training a pruned module: its zeros stay zeros, and distillation from the dense module."""
