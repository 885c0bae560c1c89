"""Rules and evidence -> a verdict for every layer, and its renderers. No torch, onnx or tensorrt here."""
