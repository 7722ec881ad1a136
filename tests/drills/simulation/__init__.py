"""The shipped cores under virtual time and bad weather: one seed, one run, one verdict."""
