"""The run folder, and every stage of a run: what it reads and leaves, when it is kept."""
