"""Engines behind one Protocol: TensorRT and ONNX Runtime."""
