"""How fast this machine trains, decodes and reads a store."""
