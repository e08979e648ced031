"""A Symbol becomes a training graph."""
