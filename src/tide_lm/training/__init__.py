"""Training: one process at a time; sharding is applied from outside."""
