"""Several ranks as one engine: rank 0 schedules and publishes plans, the others follow them."""
