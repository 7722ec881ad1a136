"""Who is on the bus, what each may say, and the commands that they are sent."""
