"""Drills: what breaks the bus on purpose, to show that nothing is lost."""
