"""The version, in a module of its own so that every layer may ask for it."""

__version__ = "0.1.0"
