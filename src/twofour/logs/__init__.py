"""Anyone's TensorRT build log, layer information and profile as records; pure."""
