"""The real SGLang engine behind the worker's engine protocols, one capability per file."""
