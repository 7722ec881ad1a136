"""Bodies of messages, one module per conversation. Their names: `bus.wire.kinds`."""
