"""All objects of a payload: numbered, compared, written into memory, built again."""
