"""What a user would run instead."""
