"""Text in, token shards out, batches to train on."""
