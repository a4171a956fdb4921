"""Checkpoints on disk: Hugging Face directories, GGUF files, and our own Orbax directories."""
