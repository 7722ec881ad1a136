"""What an actor is made of: its loop and mailbox, its process, and who keeps it running."""
