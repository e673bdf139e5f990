"""Who runs next. Torch-free."""
