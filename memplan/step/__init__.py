"""What a training step is: its graph, its schedules, and what a schedule means."""
