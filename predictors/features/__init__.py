"""What predictors read: the catalogue of inputs, and the numbers it is made of."""
