"""What both sides of a weight version need: its manifest, its formats, memory that they share."""
