"""What the searches spend their time in, compiled by numba."""
