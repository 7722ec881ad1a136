"""The command line, and local fleets: processes brought up, kept running and taken down."""
