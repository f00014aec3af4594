"""The one authority over runs: one process per kernel, which outlives it while a background run is left."""
