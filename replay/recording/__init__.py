"""What a recorder writes down, and what it notices to have missed."""
