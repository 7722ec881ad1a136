"""The live page of a gateway: its files, and the events that it draws."""
