"""Weights of a torch module."""
