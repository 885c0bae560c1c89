"""From a dense model to a 2:4-sparse TensorRT engine, with a reason for every layer."""

__version__ = "0.1.0"
