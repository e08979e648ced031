"""Offsets of buffers that live for intervals of time: quick ones, and a complete search."""
