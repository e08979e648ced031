"""The schedules that a strategy may choose from: those of mirroring, or any sequence of ops."""
