"""The parts of benchmarks/engines.py."""
