"""The server alone."""
