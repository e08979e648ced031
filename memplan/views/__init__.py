"""Plans as words, pictures and reports."""
