"""Prunes with calibration data: runs a model piece by piece, sums Gram matrices, solves layers."""
