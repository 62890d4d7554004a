"""Files that engines read, one module each engine: a class whose `export` writes them."""
