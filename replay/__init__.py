"""Everything that subscribes: the recorder and the journal that it writes.

Spec: docs/journal.md.
"""
