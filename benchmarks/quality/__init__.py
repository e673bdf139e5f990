"""What tiers cost in answers: the engine with each cold format, held against its exact cache."""
