"""What both sides of a weight version need."""
