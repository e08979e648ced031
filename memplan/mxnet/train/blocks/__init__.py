"""Gluon's blocks: what they compute as a Symbol, in which order, and what of them may change."""
