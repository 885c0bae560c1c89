"""What engine_evidence.py is made of: reading, layers, confusion, thresholds, kinds, tables."""
