"""Rules and evidence -> a verdict for every layer, and its renderers; no torch, onnx, tensorrt."""
