"""Gram matrices out of a running model, torch and ONNX, and what they solve."""
