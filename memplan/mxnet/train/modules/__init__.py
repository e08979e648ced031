"""Training by a plan in a Module."""
