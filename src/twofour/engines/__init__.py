"""Engines behind one Protocol: TensorRT, ONNX Runtime, and torch for `compare`."""
