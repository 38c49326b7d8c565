"""Tables after training: folded into static rows, in fewer bits or of lower rank, and packed into a store."""
