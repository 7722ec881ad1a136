"""Authentication and authorization: keys, the allow-list, and guards of sockets."""
