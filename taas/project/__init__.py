"""The project's folder: which processes may write to it, and its copies on other machines."""
