"""The program that runs on every VM: it starts, watches and ends the processes of runs."""
