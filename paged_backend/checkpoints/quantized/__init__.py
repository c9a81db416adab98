"""Folders of quantised safetensors: one reader for each method that a ``quantization_config`` may name."""
