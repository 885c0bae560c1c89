"""The stages of a torch model."""
