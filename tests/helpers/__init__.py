"""What several test files use: graphs, networks, schedules, and runs by MXNet to compare with."""
