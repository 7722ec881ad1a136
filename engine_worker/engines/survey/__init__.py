"""What this machine, its packages and a model allow: findings for `rolloutbus doctor`."""
