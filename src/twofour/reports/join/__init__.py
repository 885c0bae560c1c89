"""What an engine's log, layer information and profile say, joined with the layers of a model."""
