"""Many jobs of one kind: side by side in processes of this machine, or on a Ray cluster."""
