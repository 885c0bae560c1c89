"""An ONNX file, piece by piece, in a worker process."""
