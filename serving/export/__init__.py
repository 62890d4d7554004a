"""Files that engines read: for each engine one module with a class whose `export` writes them."""
