"""Helpers that know nothing of training: bytes in words, progress, interrupts, files."""
