"""The engine that runs Hugging Face models in this process."""
