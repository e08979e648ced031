"""The arrays of training by a plan: where they lie, who reads and writes them, gradients."""
