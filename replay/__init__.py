"""Subscribers and recorders, and what is made from their recordings.

`subscriber` and `recorder` listen to a fleet, `forwarder` passes its streams on, `player` publishes
a journal again, `offline` gives a trainer what was recorded; their cores lie beside them.
Spec: docs/journal.md.
"""
