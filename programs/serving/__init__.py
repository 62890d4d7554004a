"""Programs for serving engines."""
