"""The run folder, and every stage of a run: what it reads, what it leaves, when it is done again."""
