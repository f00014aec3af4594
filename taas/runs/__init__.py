"""The folder of a run (its record, its output and rank 0's variables), and the code to read it."""
