"""What runs inside SGLang's scheduler processes: hooks, and what they need beside the model."""
