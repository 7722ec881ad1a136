"""An actor's parts: loop, mailbox, process, and the supervisor that keeps it running."""
