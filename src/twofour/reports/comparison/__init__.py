"""Ratios, intervals, gates and layers of a latency comparison, and how they are shown."""
