"""Timelines: what each worker did when, out of a journal, as a page, a picture or a trace."""
