"""What a player publishes of a journal, and when: the recorded streams, byte for byte."""
