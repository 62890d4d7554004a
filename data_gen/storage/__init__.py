"""The harvest on disk."""
