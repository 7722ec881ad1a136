"""What must hold for all of the source code, whatever it does."""
