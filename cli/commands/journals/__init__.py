"""Commands that write and read journals."""
