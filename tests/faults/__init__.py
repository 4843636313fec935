"""Real processes, killed, stopped and cut off at every step."""
