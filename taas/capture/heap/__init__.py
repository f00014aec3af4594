"""All objects of a payload: how they are numbered, compared, written to memory and rebuilt."""
