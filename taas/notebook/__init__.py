"""Show runs in a notebook or a terminal, and let the user monitor and control them."""
