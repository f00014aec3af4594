"""The project's folder: who may write in it, and its copies on other machines."""
