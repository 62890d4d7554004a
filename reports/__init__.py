"""A page of figures and tables made from what other programs saved."""
