"""The TensorRT engine, built with Polygraphy on top of the Python bindings."""
