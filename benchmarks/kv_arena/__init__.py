"""What the bookkeeping of tiered KV costs, what it holds, and whether it ever goes wrong."""
