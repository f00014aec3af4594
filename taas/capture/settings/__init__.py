"""Process state other than objects: settings, random states and setup cells."""
