"""How schedules are found."""
