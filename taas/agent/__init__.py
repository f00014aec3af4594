"""The program that runs on every VM: it starts the processes of runs as jobs, watches them and ends them."""
