"""Tokens per second of the engine in this process, beside Hugging Face `generate`."""
