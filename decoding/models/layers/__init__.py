"""What layers of a model see and keep besides the keys and values of full attention."""
