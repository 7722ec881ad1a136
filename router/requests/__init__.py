"""Requests in the router: validated, admitted, queued, dispatched, ended."""
