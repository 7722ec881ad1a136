"""What several engines are built from."""
