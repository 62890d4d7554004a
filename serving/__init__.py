"""Files for serving engines, and from them."""
