"""Follows streams for a subscriber: finds gaps, repairs them, and reports events to the reader."""
