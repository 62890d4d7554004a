"""Settings, files, errors and tracking, shared by all programs; nothing here knows of models."""
