"""The engine with a cache whose tokens age, beside its own exact mode and vLLM."""
