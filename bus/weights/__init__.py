"""Weight versions: formats and memory that trainers, stores and workers share."""
