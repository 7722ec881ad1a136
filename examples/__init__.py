"""Programs that use only `import rolloutbus`: a quickstart and the demo of asynchronous RL."""
