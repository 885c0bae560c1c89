"""Model sources: what the user names, loaded as a module with example inputs or as an ONNX file."""
