"""Ruled lines of tables: long straight runs of ink, and how much ink each row and column has."""
