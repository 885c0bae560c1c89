"""Processes of their own for whatever loads a model into a library that may crash or hang."""
