"""What the router adds to a request, beside LiteLLM in the same run."""
