"""The wire format, byte for byte."""
