"""A run's folder: its record, its events, its answer, and what reads them."""
