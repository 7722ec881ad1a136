"""What is used of the `sglang` package: its names, its types, its arguments, its hooks."""
