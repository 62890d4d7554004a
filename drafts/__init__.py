"""Making a draft model."""
