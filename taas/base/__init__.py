"""What the whole of taas stands on: Linux, import hooks, words, folders, the poll loop."""
