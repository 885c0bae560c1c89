"""Model sources, the run folder, the stages and the run."""
