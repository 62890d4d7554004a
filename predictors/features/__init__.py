"""Inputs of predictors: their catalogue, and the numbers they consist of."""
