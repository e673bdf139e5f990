"""The decoder, driven by a Hugging Face config."""
