"""The shipped cores under virtual time and bad weather."""
