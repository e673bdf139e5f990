"""What a fresh long prompt does to the others on the same GPU, beside vLLM."""
