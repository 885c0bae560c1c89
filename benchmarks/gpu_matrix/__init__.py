"""The parts of gpu.py: what it measures, with which clocks, and what it says."""
