"""What a notebook shows of runs: tables, the live line, output, widgets."""
