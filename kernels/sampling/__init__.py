"""One token a row of logits: greedy, or drawn from what the filters keep."""
