"""What a notebook or a terminal shows of runs, and what a person can do with them."""
