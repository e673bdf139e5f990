"""Where KV lives. Torch-free."""
