"""What decoding would have counted, read off a harvest."""
