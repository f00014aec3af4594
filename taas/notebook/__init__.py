"""Shows runs in a notebook or a terminal, and lets a person steer them."""
