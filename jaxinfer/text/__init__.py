"""Text to token ids and back: tokenizers, incremental text, chat templates."""
