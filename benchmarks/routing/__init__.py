"""Replica choice on real Ray: the cached tokens it finds, and how even the load stays."""
