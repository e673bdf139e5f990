"""How a scheduled batch becomes sampled tokens."""
