"""A lease of a GPU machine without network: what is prepared here, and the calls that run there."""
