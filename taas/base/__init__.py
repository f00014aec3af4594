"""The base package of taas: Linux, import hooks, wording, folders and the poll loop."""
