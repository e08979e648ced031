"""Training by a plan."""
