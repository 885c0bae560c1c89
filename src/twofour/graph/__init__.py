"""An ONNX file, read once: scopes, traces, layers and their weights."""
