"""Decode attention over slabs of several formats, beside FlashAttention 3 over bfloat16."""
