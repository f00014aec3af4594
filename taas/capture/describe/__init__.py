"""How individual objects are read and described for transfer."""
