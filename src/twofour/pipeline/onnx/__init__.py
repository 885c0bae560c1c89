"""The stages of an ONNX file."""
