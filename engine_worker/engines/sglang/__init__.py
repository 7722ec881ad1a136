"""The real SGLang engine behind the worker's engine protocols, one capability per file.

This package runs in the engine host; `inside` runs in SGLang's own scheduler processes.
"""
