"""What a schedule holds in memory: MXNet's blocks, or one packed array."""
