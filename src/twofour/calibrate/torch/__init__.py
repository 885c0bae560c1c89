"""A torch module, block by block."""
