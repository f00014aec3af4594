"""How single objects are read and described, so that they can travel."""
