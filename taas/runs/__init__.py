"""The folder of a run (its record, output and answer), and the code that reads it."""
