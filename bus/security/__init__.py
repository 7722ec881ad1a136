"""Who may speak on the bus: keys, the allow-list, and the locks on sockets."""
