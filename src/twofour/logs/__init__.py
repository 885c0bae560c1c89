"""Build logs, layer information and profiles of TensorRT: text in, records out."""
