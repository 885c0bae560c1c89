"""torch -> ONNX, with every weight mapped back to the module it came from."""
