"""The state of a process beside its objects: settings, random numbers, setup cells."""
