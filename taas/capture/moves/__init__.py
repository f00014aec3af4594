"""The ways of names: from the notebook to ranks, back, and into ranks that stay."""
