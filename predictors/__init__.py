"""Draft-side predictors: what is trained, calibrated, saved and served to the decoder."""
