"""Calibration data: what --calibrate names, as batches of the model's inputs."""
