"""What a replay is checked for: the structure of its calls and the bits of their inputs."""
