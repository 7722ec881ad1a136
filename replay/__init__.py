"""Everything that subscribes, and what is made of it afterwards.

The doors: `subscriber` and `recorder` listen to a fleet, `forwarder` passes its streams on,
`player` publishes a journal again, `offline` gives a trainer what was recorded. What each of them
decides, and how, is in the folders.
Spec: docs/journal.md.
"""
