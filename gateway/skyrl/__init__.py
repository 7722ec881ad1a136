"""The routes of SkyRL's remote client."""
