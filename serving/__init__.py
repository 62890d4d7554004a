"""Exchange of files with serving engines, and speculative decoding inside `generate`."""
